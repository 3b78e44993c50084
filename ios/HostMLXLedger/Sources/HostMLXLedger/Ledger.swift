import CLedger
import Foundation
import MLX

/// The costs of work on a GPU that this machine does not have.
///
/// A ledger visits the primitives of an evaluation in MLX's order and counts what each would cost on Metal. See `docs/gpu.md`.
public struct Ledger: Codable, Sendable, Equatable {

    public struct Kind: Codable, Sendable, Equatable {
        public var kernels = 0
        /// The floating-point operations of matrix products. A multiply–add counts as two.
        public var flop = 0.0
        public var readBytes = 0.0
        public var writtenBytes = 0.0
    }

    /// The number of evaluations on the GPU that the caller waits for.
    public var evals = 0
    /// The number of evaluations on the GPU that the caller starts without waiting (`asyncEval`).
    public var asyncEvals = 0
    /// The number of waits for an array of an `asyncEval`, plus the number of calls of `Stream.synchronize()`.
    public var waits = 0
    public var commandBuffers = 0
    /// The largest number of committed command buffers whose completion handlers had not run.
    public var mostInFlight = 0

    public var kinds: [String: Kind] = [:]

    /// The number of buffers that MLX's cache could not provide, so that the system allocates them.
    public var newBuffers = 0
    public var newBufferBytes = 0.0

    /// The peak memory of arrays and MLX's cache, in bytes, without mapped memory.
    public var peakBytes = 0
    /// The peak memory of arrays, in bytes, without MLX's cache and without mapped memory.
    public var peakActiveBytes = 0
    /// The largest number of array buffers alive at once, without those from before the recording.
    public var peakArrays = 0

    /// The number of times that `eval` polls for free memory, which keeps a CPU core busy.
    public var spins = 0
    /// The work that the GPU still has to do when `eval` polls for free memory. `readBytes` includes the bytes to be written.
    public var spinning = Kind()

    /// The number of kernels used for the first time, each of which Metal must compile.
    public var firstKernels = 0
    /// The largest number of first-used kernels between two calls of `boundary()`.
    public var mostFirstKernels = 0

    /// The number of arrays that use memory of the caller, such as a mapped file.
    public var mappings = 0
    /// The bytes of the caller's memory that kernels use. Each buffer counts whole, because Metal keeps whole buffers in memory.
    public var wiredBytes = 0.0

    public var kernels: Int { kinds.values.reduce(0) { $0 + $1.kernels } }
    public var flop: Double { kinds.values.reduce(0) { $0 + $1.flop } }
    /// The bytes that kernels read. A kernel counts each input once. A gather counts only the elements that it takes, and the indices.
    public var readBytes: Double { kinds.values.reduce(0) { $0 + $1.readBytes } }
    public var writtenBytes: Double { kinds.values.reduce(0) { $0 + $1.writtenBytes } }
}

// MARK: - Time

/// The speeds of a GPU. The defaults are estimates for iPhones with an A15 to A17.
public struct LedgerTime: Codable, Sendable, Equatable {
    /// The time of one evaluation's round trip to the GPU: 100 to 300 µs on iPhones.
    public var secondsPerEval = 200e-6
    /// The time between the starts of two dependent kernels: 4 to 8 µs.
    public var secondsPerKernel = 6e-6
    /// The rate at which kernels read and write memory.
    public var bytesPerSecond = 80e9
    /// The rate of matrix products in 16-bit precision: 0.8 to 1.8 TFLOPS on iPhones.
    public var flopPerSecond = 1.2e12

    public init() {}
}

extension Ledger {
    /// Returns the modelled time in seconds:
    ///
    ///     (evals + waits) · secondsPerEval + kernels · secondsPerKernel + bytes / bytesPerSecond + flop / flopPerSecond
    ///
    /// The model assumes that nothing overlaps.
    public func seconds(_ time: LedgerTime = LedgerTime()) -> Double {
        Double(evals + waits) * time.secondsPerEval + Double(kernels) * time.secondsPerKernel
            + (readBytes + writtenBytes) / time.bytesPerSecond + flop / time.flopPerSecond
    }

    public func secondsSpinning(_ time: LedgerTime = LedgerTime()) -> Double {
        Double(spinning.kernels) * time.secondsPerKernel + spinning.readBytes / time.bytesPerSecond
            + spinning.flop / time.flopPerSecond
    }
}

// MARK: - Rules

/// The properties of the machine that a ledger assumes.
public struct LedgerRules: Codable, Sendable, Equatable {

    /// Whether the allocator is Metal's. Metal's allocator rounds sizes above 16 KiB up to whole pages and caches freed buffers. The CPU's allocator
    /// uses exact sizes and no cache.
    public var isMetal: Bool
    /// The number of kernels above which MLX commits a command buffer.
    public var operationsPerBuffer: Int
    /// The number of elements, in units of 2²⁰, above which MLX commits the command buffer that uses them.
    public var megaElementsPerBuffer: Int
    /// The number of command buffers that may be incomplete while MLX encodes the next one. Their inputs stay in memory.
    public var runAhead: Int
    /// The generation of the GPU's architecture, such as 15 for `applegpu_g15p`.
    public var generation: Int
    /// The number of finished command buffers whose completion handlers have not run when `eval` returns.
    ///
    /// A completion handler frees the arrays of its command buffer. `Stream.synchronize()` waits for all handlers.
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

    /// The rules of an iPhone (MLX's metal/device.cpp:604) whose GPU completes command buffers only when MLX waits for them. MLX encodes up to 10
    /// tasks ahead (transforms.cpp:25).
    public static let phone = LedgerRules(
        isMetal: true, operationsPerBuffer: 20, megaElementsPerBuffer: 40, runAhead: 10)

    /// The rules of an iPhone whose GPU completes each command buffer at once. Arrays then take the least memory.
    public static var fastPhone: LedgerRules {
        inEnvironment(operationsPerBuffer: 20, megaElementsPerBuffer: 40, runAhead: 0, lateHandlers: 0)
    }
    /// The rules of an iPhone on which the completion handlers of one command buffer are late.
    public static var strictPhone: LedgerRules { inEnvironment(operationsPerBuffer: 20, megaElementsPerBuffer: 40) }
    /// The rules of an iPhone on which the completion handlers of 24 command buffers are late.
    public static var slowPhone: LedgerRules {
        inEnvironment(operationsPerBuffer: 20, megaElementsPerBuffer: 40, lateHandlers: 24)
    }
    /// The rules of an iPad or a Mac with an M chip that is no Max or Ultra (MLX's metal/device.cpp:608).
    public static var strictPad: LedgerRules { inEnvironment(operationsPerBuffer: 40, megaElementsPerBuffer: 40) }
    /// The rules of a Mac with a Max or an Ultra chip (MLX's metal/device.cpp:612).
    public static var strictMac: LedgerRules { inEnvironment(operationsPerBuffer: 50, megaElementsPerBuffer: 50) }

    /// Returns rules in which the environment variable `MLX_MAX_OPS_PER_BUFFER` overrides `operationsPerBuffer`, as in MLX.
    private static func inEnvironment(
        operationsPerBuffer: Int, megaElementsPerBuffer: Int, runAhead: Int = 10, lateHandlers: Int = 1
    ) -> LedgerRules {
        let set = getenv("MLX_MAX_OPS_PER_BUFFER").flatMap { Int(String(cString: $0)) }
        return LedgerRules(
            isMetal: true, operationsPerBuffer: set ?? operationsPerBuffer,
            megaElementsPerBuffer: megaElementsPerBuffer, runAhead: runAhead, lateHandlers: lateHandlers)
    }

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

public struct LedgerError: LocalizedError, Sendable, Equatable {
    public var message: String
    public var errorDescription: String? { message }
}

extension Ledger {

    /// Records the costs of the evaluations in `body`. Only one recording can run at a time.
    ///
    /// - Parameters:
    ///   - compute: whether to compute the values too. The graph must then be on the CPU's stream. Otherwise evaluated arrays are zeros, and a graph
    ///     on the GPU's stream needs no GPU.
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

    /// Whether this system can record. Recording must replace MLX's allocator, and this is possible only on Linux.
    public static var isAvailable: Bool {
        #if os(Linux)
            true
        #else
            false
        #endif
    }

    /// Resets the counts, except `firstKernels` and `mostFirstKernels`. Arrays that are alive stay counted.
    public static func restart() { host_ledger_restart() }

    /// Begins a new interval for `mostFirstKernels`.
    public static func boundary() { host_ledger_boundary() }
}

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

    private static func check(_ message: UnsafeMutablePointer<CChar>?) throws {
        guard let message else { return }
        defer { free(message) }
        throw LedgerError(message: String(cString: message))
    }
}
