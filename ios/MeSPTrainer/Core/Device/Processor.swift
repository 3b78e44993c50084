import Foundation
import MLX
import MeSPBundle

package struct Processor: Sendable {
    let backend: Backend
    /// Whether `quantizedMM` dequantizes the weight W tile by tile. If false, W is dequantized before most products, because MLX's own `quantizedMM`
    /// is about 50 times slower than a dense product on a CPU.
    package let dequantizesInProduct: Bool
    /// Each thread has its own buffers.
    let threads: Int
    /// Whether `compile` fuses operations. On a CPU, MLX's own `compile` would call a C++ compiler.
    let fuses: Bool
    /// Whether attention and its derivative are operations that compute the scores in tiles that fit in the caches. MLX's own operations
    /// hold all scores at once.
    var attendsByTiles: Bool
    var startsMetal: Bool
    /// Whether freed memory is reused for arrays of any size, as with malloc. MLX's own allocator reuses a buffer only for arrays of about the same
    /// size.
    let reusesMemory: Bool

    static let gpu = Processor(
        backend: .gpu, dequantizesInProduct: true, threads: 1, fuses: true, attendsByTiles: false, startsMetal: true,
        reusesMemory: false)

    static let plainCPU = Processor(
        backend: .cpu, dequantizesInProduct: false, threads: 1, fuses: false, attendsByTiles: false, startsMetal: false,
        reusesMemory: false)

    static let appleCPU = {
        var apple = plainCPU
        apple.startsMetal = true
        return apple
    }()

    @TaskLocal package static var cpu = hostCPU

    /// Calls `body` with a CPU whose operations MLX can differentiate.
    static func withPlainCPU<R>(_ body: () throws -> R) rethrows -> R { try $cpu.withValue(.plainCPU, operation: body) }

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
    func hasOperation(for attention: AttentionMixer) -> Bool {
        attendsByTiles && attention.attnLogitSoftcapping == nil
    }

    /// Returns whether a mixer's attention is a single MLX operation, whose derivative need not be one.
    func hasForwardOperation(for attention: AttentionMixer) -> Bool {
        hasOperation(for: attention)
            || backend == .gpu && attention.attnLogitSoftcapping == nil && Self.fusedHeads.contains(attention.headDim)
    }

    /// The widths of heads for which MLX's attention has GPU kernels, as in mesp/block_function/attention.py. Tests set other widths.
    @TaskLocal static var fusedHeads = [64, 80, 128]

    /// The maximum number of texts whose next tokens go through a model together in unsplit arrays.
    var uncutRows: Int { dequantizesInProduct ? CachedModel.mostTexts : QuantizedMatrix.fewRows }

    /// Returns the value of `made`, for the caller to keep. Returns nil if products dequantize whole matrices first, because those copies would then
    /// be kept too.
    func kept<T>(_ made: () -> T) -> T? { dequantizesInProduct ? made() : nil }

    /// The memory that mapped weights may take, in bytes. On a GPU it is half of the memory that the process may use, because a GPU's driver may
    /// count mapped weights as memory.
    var roomForMaps: Int {
        let memory = Int(ProcessInfo.processInfo.physicalMemory)
        return backend == .gpu ? min(memory, systemMemoryLimit() ?? .max) / 2 : memory
    }

    func keepsMaps(_ plan: Plan) -> Bool { backend == .cpu || plan.keepsMaps }

    func keepsCache(_ plan: Plan) -> Bool {
        plan.cacheBytes > 0 || backend == .cpu && reusesMemory && plan.keptBlocks > 0
    }

    func workspace(_ planner: Planner, _ plan: Plan) -> Int? { backend == .gpu ? planner.workspace(plan) : nil }

    /// Whether all kernels are compiled before the first pass.
    var hasKernels: Bool { backend == .cpu }

    func numbersWithKernels(_ numbers: ClosedRange<Int>) -> Set<Int> { hasKernels ? Set(numbers) : [] }

    func forwardPass(
        _ formulas: @autoclosure () -> Block, function: () throws -> (any BlockForward)?
    ) rethrows -> any BlockForward {
        if backend == .gpu, let function = try function() { return function }
        return formulas()
    }

    var dtype: DType { backend.dtype }

    /// Returns the functions that a run calls: in the forward pass on a GPU, and for MeBP's gradients on a CPU.
    func functions(of method: GradientMethod) -> KeyPath<Manifest.Blocks, [String: String]>? {
        backend == .gpu ? \.functions : method == .mebp ? \.plainFunctions : nil
    }

    /// Plain functions are differentiated, so their operations are not fused.
    func fuses(_ files: KeyPath<Manifest.Blocks, [String: String]>) -> Bool {
        backend == .gpu && files != \.plainFunctions
    }

    /// The maximum number of multiply-adds between two calls of `atBoundary` in the head. Both numbers take about 0.2 s, at 11 GFLOPS on a CPU and at
    /// 350 GFLOPS on a GPU.
    var workBetweenBoundaries: Int { backend == .cpu ? 1 << 30 : 1 << 35 }

    var chainsParts: Bool { backend == .gpu }
}

extension Backend {
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
