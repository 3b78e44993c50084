import CLedger
import Foundation
import MLX

/// The cost of some work on a GPU that this machine does not have.
///
/// A ledger follows the arrays that the work evaluates, in MLX's order and by MLX's rules for Metal; see
/// `docs/ledger.md` for what is counted and what is not.
///
/// ```swift
/// let ledger = try Ledger.record { step() }
/// print(ledger.kernels, ledger.evals, ledger.peakBytes, ledger.seconds())
/// ```
public struct Ledger: Codable, Sendable, Equatable {

    /// A kind of kernel.
    public struct Kind: Codable, Sendable, Equatable {
        public var kernels = 0
        /// Floating-point operations of matrix products; a multiplication and an addition are two.
        public var flop = 0.0
        public var readBytes = 0.0
        public var writtenBytes = 0.0
    }

    /// Evaluations that the caller waits for: round trips to the GPU.
    public var evals = 0
    /// Evaluations that are only begun.
    public var asyncEvals = 0
    /// Waits for an array of an evaluation that was only begun, and calls of `Stream.synchronize()`.
    public var waits = 0
    public var commandBuffers = 0
    /// The most command buffers that were committed and whose completion handlers had not run.
    public var mostInFlight = 0

    public var kinds: [String: Kind] = [:]

    /// Buffers that were not in the cache, which the system has to make and to fill with zeros.
    public var newBuffers = 0
    public var newBufferBytes = 0.0

    /// The most that arrays and MLX's cache take, without adopted (mapped) memory.
    public var peakBytes = 0
    /// The most that arrays take, without the cache and adopted memory.
    public var peakActiveBytes = 0
    /// The most buffers of arrays that are alive, without those from before the recording.
    public var peakArrays = 0

    /// Waits for memory while one command buffer is active, during which `eval` polls and keeps a core busy.
    public var spins = 0
    /// The work of the GPU during these waits.
    public var spinning = Kind()

    /// Kernels that are used for the first time, and so are compiled.
    public var firstKernels = 0
    /// The most of them between two calls of `boundary()`.
    public var mostFirstKernels = 0

    /// Arrays made of memory that the caller owns, such as a mapped file.
    public var mappings = 0
    /// That memory as far as kernels are given it, in bytes: Metal holds all of a buffer while one uses a part of it.
    public var wiredBytes = 0.0

    /// Kernels that the GPU runs.
    public var kernels: Int { kinds.values.reduce(0) { $0 + $1.kernels } }
    /// Floating-point operations of matrix products.
    public var flop: Double { kinds.values.reduce(0) { $0 + $1.flop } }
    /// Bytes that kernels read, each of their inputs once.
    public var readBytes: Double { kinds.values.reduce(0) { $0 + $1.readBytes } }
    public var writtenBytes: Double { kinds.values.reduce(0) { $0 + $1.writtenBytes } }
}

// MARK: - Time

/// A GPU's time for each part of the work; by default between the values known of iPhones with an A15 to A17.
public struct LedgerTime: Codable, Sendable, Equatable {
    /// A round trip: the caller wakes up, encodes, and the GPU starts; 100 to 300 µs.
    public var secondsPerEval = 200e-6
    /// Between the starts of two kernels that depend on each other; 4 to 8 µs.
    public var secondsPerKernel = 6e-6
    /// The bytes that kernels read and write.
    public var bytesPerSecond = 80e9
    /// Of matrix products of 16-bit numbers and of 4-bit ones by 16-bit ones; 0.8 to 1.8 TFLOPS.
    public var flopPerSecond = 1.2e12

    public init() {}
}

extension Ledger {
    /// Seconds by a model in which nothing overlaps:
    /// evals · t_eval + kernels · t_kernel + bytes / bandwidth + FLOP / throughput.
    public func seconds(_ time: LedgerTime = LedgerTime()) -> Double {
        Double(evals + waits) * time.secondsPerEval + Double(kernels) * time.secondsPerKernel
            + (readBytes + writtenBytes) / time.bytesPerSecond + flop / time.flopPerSecond
    }

    /// Seconds during which `eval` polls, if the GPU has all of what it waits for still before it: no more than these.
    public func secondsSpinning(_ time: LedgerTime = LedgerTime()) -> Double {
        Double(spinning.kernels) * time.secondsPerKernel + spinning.readBytes / time.bytesPerSecond
            + spinning.flop / time.flopPerSecond
    }
}

// MARK: - Rules

/// The machine that a ledger reckons with.
public struct LedgerRules: Codable, Sendable, Equatable {

    /// Metal's allocator: whole pages of 16 KiB for what is longer than one, and a cache of freed buffers. Otherwise the
    /// CPU's: exact sizes and no cache.
    public var isMetal: Bool
    /// A command buffer is committed after more kernels than this …
    public var operationsPerBuffer: Int
    /// … or when it uses buffers with more elements than this, in units of 2²⁰.
    public var megaElementsPerBuffer: Int
    /// Command buffers that are not complete while the next one is encoded. Their inputs are held: the memory of a GPU
    /// that is that far behind.
    public var runAhead: Int
    /// The generation of the GPU's architecture, as 15 in `applegpu_g15p`.
    public var generation: Int
    /// The number of command buffers that are complete when an `eval` returns, but whose completion handlers have not run. A
    /// handler ends a task and frees its arrays, on another thread. MLX waits for handlers only where it waits for a task, and
    /// in `Stream.synchronize()`, for all. Without such a wait they run when as many more command buffers are committed.
    public var lateHandlers: Int

    public init(
        isMetal: Bool, operationsPerBuffer: Int, megaElementsPerBuffer: Int, runAhead: Int, generation: Int = 15,
        lateHandlers: Int = 0
    ) {
        self.isMetal = isMetal
        self.operationsPerBuffer = operationsPerBuffer
        self.megaElementsPerBuffer = megaElementsPerBuffer
        self.runAhead = runAhead
        self.generation = generation
        self.lateHandlers = lateHandlers
    }

    /// An iPhone (MLX's metal/device.cpp:604) whose GPU completes nothing before it must: the encoder is ahead by the
    /// 10 tasks that MLX allows (transforms.cpp:25), or until `memoryLimit` or an `eval` makes it wait.
    public static let phone = LedgerRules(
        isMetal: true, operationsPerBuffer: 20, megaElementsPerBuffer: 40, runAhead: 10)

    /// An iPhone whose GPU completes each command buffer as soon as it is committed: the least that arrays take.
    public static var fastPhone: LedgerRules {
        inEnvironment(operationsPerBuffer: 20, megaElementsPerBuffer: 40, runAhead: 0, lateHandlers: 0)
    }
    /// One like `phone` with one late command buffer: what arrays take where handlers run at once.
    public static var strictPhone: LedgerRules { inEnvironment(operationsPerBuffer: 20, megaElementsPerBuffer: 40) }
    /// An iPhone whose handlers run 0.5 to 3 ms after their command buffer: up to 36 of MLX's command buffers are in flight then.
    public static var slowPhone: LedgerRules {
        inEnvironment(operationsPerBuffer: 20, megaElementsPerBuffer: 40, lateHandlers: 24)
    }
    /// An iPad with an M chip, or a Mac with one that is no Max or Ultra (device.cpp:608).
    public static var strictPad: LedgerRules { inEnvironment(operationsPerBuffer: 40, megaElementsPerBuffer: 40) }
    /// A Mac with a Max or an Ultra (device.cpp:612).
    public static var strictMac: LedgerRules { inEnvironment(operationsPerBuffer: 50, megaElementsPerBuffer: 50) }

    /// - Parameter operationsPerBuffer: unless `MLX_MAX_OPS_PER_BUFFER` is set.
    private static func inEnvironment(
        operationsPerBuffer: Int, megaElementsPerBuffer: Int, runAhead: Int = 10, lateHandlers: Int = 1
    ) -> LedgerRules {
        let set = getenv("MLX_MAX_OPS_PER_BUFFER").flatMap { Int(String(cString: $0)) }
        return LedgerRules(
            isMetal: true, operationsPerBuffer: set ?? operationsPerBuffer,
            megaElementsPerBuffer: megaElementsPerBuffer, runAhead: runAhead, lateHandlers: lateHandlers)
    }

    /// MLX's CPU, where each operation is complete before the next begins.
    public static let cpu = LedgerRules(
        isMetal: false, operationsPerBuffer: 0, megaElementsPerBuffer: .max >> 32, runAhead: 0)

    fileprivate func ctx(compute: Bool, _ device: DeviceType) -> HostLedgerRules {
        HostLedgerRules(
            compute: compute, metal: isMetal, operations_per_buffer: Int32(clamping: operationsPerBuffer),
            mega_elements_per_buffer: Int32(clamping: megaElementsPerBuffer),
            run_ahead: Int32(clamping: runAhead), generation: Int32(clamping: generation),
            gpu_only: device == .gpu, late_handlers: Int32(clamping: lateHandlers))
    }
}

// MARK: - Recording

/// Why nothing was recorded.
public struct LedgerError: LocalizedError, Sendable, Equatable {
    public var message: String
    public var errorDescription: String? { message }
}

extension Ledger {

    /// Records what `body` evaluates.
    ///
    /// Without `compute` nothing is computed: whatever is evaluated becomes zeros at once, which may be read, and a
    /// graph on the GPU's stream needs no GPU. With it the values are also computed, for which they must be on the CPU's
    /// stream. One ledger is recorded at a time.
    ///
    /// - Parameters:
    ///   - device: the default device inside `body`. The rules are applied to what is on the CPU's stream too, if it is the CPU.
    ///   - trace: called for each primitive, in the order of evaluation, with the number of elements of its output.
    public static func record(
        compute: Bool = false, device: DeviceType = .gpu, rules: LedgerRules = .phone,
        trace: ((_ primitive: String, _ size: Int) -> Void)? = nil, _ body: () throws -> Void
    ) throws -> Ledger {
        let recording = try Recording(rules.ctx(compute: compute, device), trace)
        do {
            try withError { try Device.withDefaultDevice(Device(device), body) }
        } catch {
            _ = try? recording.end()
            throw error
        }
        return try recording.end()
    }

    /// Whether this system can record: only on Linux can an executable stand in for MLX's allocator.
    public static var isAvailable: Bool {
        #if os(Linux)
            true
        #else
            false
        #endif
    }

    /// Begins the counts of the recording again: what came before is not in them, but for the arrays that it left and the kernels that it
    /// used first.
    public static func restart() { host_ledger_restart() }

    /// Marks a point at which the work may pause, for `mostFirstKernels`.
    public static func boundary() { host_ledger_boundary() }

    /// The same, of work that suspends.
    public static func record(
        compute: Bool = false, device: DeviceType = .gpu, rules: LedgerRules = .phone,
        trace: ((_ primitive: String, _ size: Int) -> Void)? = nil, _ body: () async throws -> Void
    ) async throws -> Ledger {
        let recording = try Recording(rules.ctx(compute: compute, device), trace)
        do {
            try await withError { try await Device.withDefaultDevice(Device(device), body) }
        } catch {
            _ = try? recording.end()
            throw error
        }
        return try recording.end()
    }
}

/// A recording that has begun.
private final class Recording {
    private let trace: ((String, Int) -> Void)?

    init(_ rules: HostLedgerRules, _ trace: ((String, Int) -> Void)?) throws {
        self.trace = trace
        try Self.check(host_ledger_begin(rules))
        guard trace != nil else { return }
        host_ledger_trace(Unmanaged.passUnretained(self).toOpaque()) { context, primitive, size in
            guard let context, let primitive else { return }
            Unmanaged<Recording>.fromOpaque(context).takeUnretainedValue().trace?(String(cString: primitive), size)
        }
    }

    func end() throws -> Ledger {
        var counts = HostLedgerCounts()
        var ledger = Ledger()
        let message = withUnsafeMutablePointer(to: &ledger.kinds) { kinds in
            host_ledger_end(&counts, kinds) { context, name, kind in
                guard let context, let name else { return }
                context.assumingMemoryBound(to: [String: Ledger.Kind].self).pointee[String(cString: name)] = .init(
                    kernels: kind.kernels, flop: kind.flop, readBytes: kind.read_bytes,
                    writtenBytes: kind.written_bytes)
            }
        }
        try Self.check(message)
        ledger.evals = counts.evals
        ledger.asyncEvals = counts.async_evals
        ledger.waits = counts.waits
        ledger.commandBuffers = counts.command_buffers
        ledger.mostInFlight = counts.most_in_flight
        ledger.newBuffers = counts.new_buffers
        ledger.newBufferBytes = counts.new_buffer_bytes
        ledger.peakBytes = counts.peak_bytes
        ledger.peakActiveBytes = counts.peak_active_bytes
        ledger.peakArrays = counts.peak_arrays
        ledger.spins = counts.spins
        ledger.spinning = .init(kernels: counts.spin_kernels, flop: counts.spin_flop, readBytes: counts.spin_bytes)
        ledger.firstKernels = counts.first_kernels
        ledger.mostFirstKernels = counts.most_first_kernels
        ledger.mappings = counts.mappings
        ledger.wiredBytes = counts.wired_bytes
        return ledger
    }

    /// Throws the message, which is freed.
    private static func check(_ message: UnsafeMutablePointer<CChar>?) throws {
        guard let message else { return }
        defer { free(message) }
        throw LedgerError(message: String(cString: message))
    }
}
