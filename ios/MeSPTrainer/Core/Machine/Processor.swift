import Foundation
import MeSPBundle

/// The kind of processor that MLX computes on: a GPU, the CPU of an Apple device, or the CPU of Linux with HostMLX. This folder contains all code
/// that depends on the kind of processor.
package struct Processor: Sendable {
    let backend: Backend
    /// Whether `quantizedMM` unpacks W in tiles that fit in the caches. MLX's own operation does not do so on a CPU, and is about 50 times slower
    /// there than a dense product. If this is false, W is dequantized before the product.
    package let dequantizesInProduct: Bool
    /// The number of threads of a product on a CPU. Each thread unpacks and arranges matrices in its own buffers.
    let threads: Int
    /// Whether `compile` fuses operations. On a CPU, MLX's own `compile` would call a C++ compiler.
    let fuses: Bool
    /// Whether attention and its derivative are operations that compute the scores in tiles that fit in the caches. MLX's own operations
    /// hold all scores at once.
    var attendsByTiles: Bool
    /// Whether MLX allocates arrays through Metal, and so starts Metal.
    var startsMetal: Bool
    /// Whether freed memory serves an array of any size, as with malloc. MLX's own allocator reuses a freed buffer only for arrays of about the
    /// buffer's size.
    let reusesMemory: Bool

    static let gpu = Processor(
        backend: .gpu, dequantizesInProduct: true, threads: 1, fuses: true, attendsByTiles: false, startsMetal: true,
        reusesMemory: false)

    /// The CPU with MLX's own operations.
    static let plainCPU = Processor(
        backend: .cpu, dequantizesInProduct: false, threads: 1, fuses: false, attendsByTiles: false, startsMetal: false,
        reusesMemory: false)

    static let appleCPU = {
        var apple = plainCPU
        apple.startsMetal = true
        return apple
    }()

    /// The CPU of this program. Tests also set other CPUs.
    @TaskLocal package static var cpu = hostCPU

    private static var hostCPU: Processor {
        #if os(Linux)
            let process = ProcessInfo.processInfo
            let asked = process.environment["OPENBLAS_NUM_THREADS"].flatMap { Int($0) } ?? 0
            return Processor(
                backend: .cpu, dequantizesInProduct: true,
                threads: asked > 0 ? asked : min(8, process.activeProcessorCount), fuses: true, attendsByTiles: true,
                startsMetal: false, reusesMemory: true)
        #else
            return appleCPU
        #endif
    }
}

extension Processor {
    /// Returns whether a mixer's attention is one operation.
    func hasOperation(for attention: AttentionMixer) -> Bool {
        attendsByTiles && attention.attnLogitSoftcapping == nil
    }

    /// The most texts whose next tokens go through a model together in uncut arrays.
    var uncutRows: Int { dequantizesInProduct ? CachedModel.mostTexts : QuantizedMatrix.fewRows }

    /// Returns the value that `made` computes from a block's weights, to be kept while they are mapped; nil if the value would also keep matrices in
    /// float32.
    func kept<T>(_ made: () -> T) -> T? { dequantizesInProduct ? made() : nil }

    /// The memory that mapped weights may take, in bytes. On a CPU they do not count as the process's memory. A GPU's driver may count them, so on a
    /// GPU they may take half of the process's limit.
    var roomForMaps: Int {
        let memory = Int(ProcessInfo.processInfo.physicalMemory)
        return backend == .gpu ? min(memory, systemMemoryLimit() ?? .max) / 2 : memory
    }

    /// Returns whether a plan's arrays on disk stay mapped from one use to the next.
    func keepsMaps(_ plan: Plan) -> Bool { backend == .cpu || plan.keepsMaps }

    /// Returns whether MLX keeps freed buffers from one block to the next. MLX keeps them if the plan has room for them, or if the next step reuses
    /// the memory of kept blocks.
    func keepsCache(_ plan: Plan) -> Bool {
        plan.cacheBytes > 0 || backend == .cpu && reusesMemory && plan.keptBlocks > 0
    }

    /// Returns the most bytes that the arrays of one block or of the head may take before MLX waits; nil on a CPU, on which MLX always waits.
    func workspace(_ planner: Planner, _ plan: Plan) -> Int? { backend == .gpu ? planner.workspace(plan) : nil }

    /// Whether all kernels exist before the first pass. A GPU compiles them during that pass.
    var hasKernels: Bool { backend == .cpu }

    /// Returns the `numbers` for which kernels exist before the first pass: all on a CPU, none on a GPU.
    func numbersWithKernels(_ numbers: ClosedRange<Int>) -> Set<Int> { hasKernels ? Set(numbers) : [] }

    /// Returns a block's forward pass. On a GPU it is the bundle's function if the block has one. A function runs on one stream. So on
    /// a CPU the same formulas are called one by one, and each product uses all cores.
    func forwardPass(
        _ formulas: @autoclosure () -> Block, function: () throws -> (any BlockForward)?
    ) rethrows -> any BlockForward {
        if backend == .gpu, let function = try function() { return function }
        return formulas()
    }

    /// Returns whether MLX fuses the operations of the functions in `files`. On a GPU it fuses the functions that are called. It does not fuse the
    /// plain functions, which are differentiated.
    func fuses(_ files: KeyPath<Manifest.Blocks, [String: String]>) -> Bool {
        backend == .gpu && files != \.plainFunctions
    }

    /// The maximum number of multiplications, each with an addition, between two boundaries of the head. The smaller number, for a CPU, takes 0.2 s
    /// at 11 GFLOPS. The larger number, for a GPU, takes 0.2 s at 350 GFLOPS. On a GPU each boundary is a round trip.
    var workBetweenBoundaries: Int { backend == .cpu ? 1 << 30 : 1 << 35 }

    /// Whether MLX encodes the next part of a formula while a part is computed.
    var chainsParts: Bool { backend == .gpu }
}

extension Backend {
    /// The processor for bundles of this backend.
    package var processor: Processor {
        switch self {
        case .cpu: .cpu
        case .gpu: .gpu
        }
    }
}

extension ModelBundle {
    package var processor: Processor { backend.processor }
}
