import CLedger
import Foundation
import MLX

/// The costs of some work on a GPU that this machine does not have.
///
/// A ledger follows the arrays that the work evaluates, in MLX's order and by MLX's rules for Metal. `docs/ledger.md` says which costs are counted.
///
/// ```swift
/// let ledger = try Ledger.record { step() }
/// print(ledger.kernels, ledger.evals, ledger.peakBytes, ledger.seconds())
/// ```
public struct Ledger: Codable, Sendable, Equatable {

    /// The totals of one kind of kernel.
    public struct Kind: Codable, Sendable, Equatable {
        public var kernels = 0
        /// The floating-point operations of matrix products. A multiplication and an addition are two.
        public var flop = 0.0
        public var readBytes = 0.0
        public var writtenBytes = 0.0
    }

    /// The number of evaluations for which the caller waits. Each is a round trip to the GPU.
    public var evals = 0
    /// The number of evaluations that the caller only begins, and does not wait for.
    public var asyncEvals = 0
    /// The number of waits for an array of an evaluation that was only begun, and of calls of `Stream.synchronize()`.
    public var waits = 0
    public var commandBuffers = 0
    /// The largest number of committed command buffers whose completion handlers had not run.
    public var mostInFlight = 0

    public var kinds: [String: Kind] = [:]

    /// The number of buffers that were not in the cache. The system must allocate each of them and fill it with zeros.
    public var newBuffers = 0
    public var newBufferBytes = 0.0

    /// The peak memory of arrays and MLX's cache, in bytes, without adopted (mapped) memory.
    public var peakBytes = 0
    /// The peak memory of arrays, in bytes, without the cache and adopted memory.
    public var peakActiveBytes = 0
    /// The largest number of buffers in use by arrays, without the buffers from before the recording.
    public var peakArrays = 0

    /// The number of waits for memory while one command buffer is active. In such a wait `eval` polls and keeps a core busy.
    public var spins = 0
    /// The work of the GPU during these waits.
    public var spinning = Kind()

    /// The number of kernels that are used for the first time, and so are compiled.
    public var firstKernels = 0
    /// The largest number of first-used kernels between two calls of `boundary()`.
    public var mostFirstKernels = 0

    /// The number of arrays that use memory of the caller, such as a mapped file.
    public var mappings = 0
    /// The bytes of the caller's memory that kernels use. Metal keeps a whole buffer in memory while a kernel uses a part of it.
    public var wiredBytes = 0.0

    /// The number of kernels that the GPU runs.
    public var kernels: Int { kinds.values.reduce(0) { $0 + $1.kernels } }
    /// The floating-point operations of matrix products.
    public var flop: Double { kinds.values.reduce(0) { $0 + $1.flop } }
    /// The bytes that kernels read, with each input counted once.
    public var readBytes: Double { kinds.values.reduce(0) { $0 + $1.readBytes } }
    public var writtenBytes: Double { kinds.values.reduce(0) { $0 + $1.writtenBytes } }
}

// MARK: - Time

/// A GPU's time for each part of the work. The defaults are between the known values of iPhones with an A15 to A17.
public struct LedgerTime: Codable, Sendable, Equatable {
    /// The time of a round trip, in which the caller wakes up, encodes, and the GPU starts: 100 to 300 µs.
    public var secondsPerEval = 200e-6
    /// The time between the starts of two dependent kernels: 4 to 8 µs.
    public var secondsPerKernel = 6e-6
    /// The rate at which kernels read and write memory.
    public var bytesPerSecond = 80e9
    /// The rate of matrix products of 16-bit numbers, and of 4-bit by 16-bit numbers: 0.8 to 1.8 TFLOPS.
    public var flopPerSecond = 1.2e12

    public init() {}
}

extension Ledger {
    /// Returns the seconds by a model in which nothing overlaps: evals · t_eval + kernels · t_kernel + bytes / bandwidth + FLOP / throughput.
    public func seconds(_ time: LedgerTime = LedgerTime()) -> Double {
        Double(evals + waits) * time.secondsPerEval + Double(kernels) * time.secondsPerKernel
            + (readBytes + writtenBytes) / time.bytesPerSecond + flop / time.flopPerSecond
    }

    /// Returns an upper bound of the seconds during which `eval` polls, for a GPU that has not begun the work for which `eval` waits.
    public func secondsSpinning(_ time: LedgerTime = LedgerTime()) -> Double {
        Double(spinning.kernels) * time.secondsPerKernel + spinning.readBytes / time.bytesPerSecond
            + spinning.flop / time.flopPerSecond
    }
}

// MARK: - Rules

/// The properties of the machine that a ledger assumes.
public struct LedgerRules: Codable, Sendable, Equatable {

    /// Whether the allocator is Metal's, with whole pages of 16 KiB for buffers longer than one page, and a cache of freed buffers. Otherwise it is
    /// the CPU's, with exact sizes and no cache.
    public var isMetal: Bool
    /// The number of kernels above which a command buffer is committed.
    public var operationsPerBuffer: Int
    /// The number of elements in its buffers, in units of 2²⁰, above which a command buffer is committed.
    public var megaElementsPerBuffer: Int
    /// The number of incomplete command buffers while the next one is encoded. Their inputs stay in memory.
    public var runAhead: Int
    /// The generation of the GPU's architecture, such as 15 for `applegpu_g15p`.
    public var generation: Int
    /// The number of complete command buffers whose completion handlers have not run when an `eval` returns. A handler ends a task and frees its
    /// arrays, on another thread. MLX waits for handlers only when it waits for a task, and in `Stream.synchronize()`, which waits for all handlers.
    /// Without such a wait, the handlers of a command buffer run when this number of later command buffers has been committed.
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

    /// The rules of an iPhone (MLX's metal/device.cpp:604) whose GPU completes nothing before it must. The encoder is ahead by the 10 tasks that MLX
    /// allows (transforms.cpp:25), or until `memoryLimit` or an `eval` makes it wait.
    public static let phone = LedgerRules(
        isMetal: true, operationsPerBuffer: 20, megaElementsPerBuffer: 40, runAhead: 10)

    /// The rules of an iPhone whose GPU completes each command buffer as soon as it is committed. By these rules arrays take the least memory.
    public static var fastPhone: LedgerRules {
        inEnvironment(operationsPerBuffer: 20, megaElementsPerBuffer: 40, runAhead: 0, lateHandlers: 0)
    }
    /// The rules of `phone` with one late command buffer. By these rules the peak memory is that of a phone whose handlers run at once.
    public static var strictPhone: LedgerRules { inEnvironment(operationsPerBuffer: 20, megaElementsPerBuffer: 40) }
    /// The rules of an iPhone whose handlers run 0.5 to 3 ms after their command buffer. Then up to 36 of MLX's command buffers are in flight.
    public static var slowPhone: LedgerRules {
        inEnvironment(operationsPerBuffer: 20, megaElementsPerBuffer: 40, lateHandlers: 24)
    }
    /// The rules of an iPad with an M chip, or a Mac with an M chip other than a Max or Ultra (device.cpp:608).
    public static var strictPad: LedgerRules { inEnvironment(operationsPerBuffer: 40, megaElementsPerBuffer: 40) }
    /// The rules of a Mac with a Max or an Ultra (device.cpp:612).
    public static var strictMac: LedgerRules { inEnvironment(operationsPerBuffer: 50, megaElementsPerBuffer: 50) }

    /// - Parameter operationsPerBuffer: the property's value, unless the environment variable `MLX_MAX_OPS_PER_BUFFER` is set.
    private static func inEnvironment(
        operationsPerBuffer: Int, megaElementsPerBuffer: Int, runAhead: Int = 10, lateHandlers: Int = 1
    ) -> LedgerRules {
        let set = getenv("MLX_MAX_OPS_PER_BUFFER").flatMap { Int(String(cString: $0)) }
        return LedgerRules(
            isMetal: true, operationsPerBuffer: set ?? operationsPerBuffer,
            megaElementsPerBuffer: megaElementsPerBuffer, runAhead: runAhead, lateHandlers: lateHandlers)
    }

    /// The rules of MLX's CPU, where each operation is complete before the next begins.
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

/// The reason why nothing was recorded.
public struct LedgerError: LocalizedError, Sendable, Equatable {
    public var message: String
    public var errorDescription: String? { message }
}

extension Ledger {

    /// Records the costs of the evaluations in `body`.
    ///
    /// Without `compute` nothing is computed. Evaluated arrays become zeros at once, which may be read, and a graph on the GPU's stream needs no GPU.
    /// With `compute` the values are also computed, so they must be on the CPU's stream. One ledger is recorded at a time.
    ///
    /// - Parameters:
    ///   - device: the default device in `body`. If it is the CPU, the rules also apply to work on the CPU's stream.
    ///   - trace: called for each primitive in the order of evaluation, with the number of elements in its output.
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

    /// Whether this system can record. Only on Linux can an executable replace MLX's allocator.
    public static var isAvailable: Bool {
        #if os(Linux)
            true
        #else
            false
        #endif
    }

    /// Resets the counts of the recording. Arrays from before stay counted, and kernels used before do not count as first used.
    public static func restart() { host_ledger_restart() }

    /// Marks a point at which the work may pause, for `mostFirstKernels`.
    public static func boundary() { host_ledger_boundary() }

    /// Records the costs of the evaluations in an asynchronous `body`.
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

/// A recording in progress.
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

    /// Throws the message, and frees it.
    private static func check(_ message: UnsafeMutablePointer<CChar>?) throws {
        guard let message else { return }
        defer { free(message) }
        throw LedgerError(message: String(cString: message))
    }
}
