import Foundation
import MeSPBundle

/// The kind of processor that MLX computes on: a GPU, the CPU of an Apple device, or the CPU of Linux with HostMLX. This folder has all that
/// depends on it.
package struct Processor: Sendable {
    let backend: Backend
    /// Whether `quantizedMM` unpacks tiles of W that stay in the caches. MLX's own on a CPU, some 50 times slower than a dense product, does
    /// not: there W is dequantized before the product.
    package let dequantizesInProduct: Bool
    /// The threads of a product on a CPU, each of which unpacks and arranges matrices in buffers of its own.
    let threads: Int
    /// Whether `compile` fuses operations. MLX's own on a CPU would call a compiler of C++.
    let fuses: Bool
    /// Whether attention, and its derivative, are an operation that makes the scores by tiles that stay in the caches. MLX's own makes all of
    /// them.
    var attendsByTiles: Bool
    /// Whether MLX takes the memory of arrays from Metal, which it starts for that.
    var startsMetal: Bool
    /// Whether memory that is freed serves an array of any size, as malloc's does. MLX's own keeps buffers for arrays of their size.
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

    /// That of this program. Tests compute by another one too.
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
    /// Whether attention is one operation.
    func hasOperation(for attention: AttentionMixer) -> Bool {
        attendsByTiles && attention.attnLogitSoftcapping == nil
    }

    /// The number of texts whose next tokens go through a model together without being cut.
    var uncutRows: Int { dequantizesInProduct ? CachedModel.mostTexts : QuantizedMatrix.fewRows }

    /// Returns what is made of a block's weights, to be kept while they are mapped; nil where products would keep matrices in float32 with it.
    func kept<T>(_ made: () -> T) -> T? { dequantizesInProduct ? made() : nil }

    /// The memory for weights that stay mapped, in bytes. On a CPU they do not count. A GPU's driver may count them, so there they may take
    /// half of what the process may.
    var roomForMaps: Int {
        let memory = Int(ProcessInfo.processInfo.physicalMemory)
        return backend == .gpu ? min(memory, systemMemoryLimit() ?? .max) / 2 : memory
    }

    /// Whether a plan's arrays on disk stay mapped from one use to the next.
    func keepsMaps(_ plan: Plan) -> Bool { backend == .cpu || plan.keepsMaps }

    /// Whether buffers that MLX keeps stay from one block to the next: where the plan has room for them, or where what the kept blocks take
    /// the next step takes again.
    func keepsCache(_ plan: Plan) -> Bool {
        plan.cacheBytes > 0 || backend == .cpu && reusesMemory && plan.keptBlocks > 0
    }

    /// The most that the arrays of one block or of the head may take before MLX waits, in bytes; nil on a CPU, where it always waits.
    func workspace(_ planner: Planner, _ plan: Plan) -> Int? { backend == .gpu ? planner.workspace(plan) : nil }

    /// Whether all kernels are there before the first pass. A GPU compiles them.
    var hasKernels: Bool { backend == .cpu }

    /// The numbers of tokens whose kernels are there before the first pass, of some.
    func numbersWithKernels(_ numbers: ClosedRange<Int>) -> Set<Int> { hasKernels ? Set(numbers) : [] }

    /// A block's forward pass: by the bundle's function on a GPU, whose kernels it lays out, where the block has one. A function runs on one
    /// stream: on a CPU the same formulas are called one by one, so that each product has all cores.
    func forwardPass(
        _ formulas: @autoclosure () -> Block, function: () throws -> (any BlockForward)?
    ) rethrows -> any BlockForward {
        if backend == .gpu, let function = try function() { return function }
        return formulas()
    }

    /// Whether MLX fuses the operations of the functions in some of a kind's files, which are called; a plain one is differentiated.
    func fuses(_ files: KeyPath<Manifest.Blocks, [String: String]>) -> Bool {
        backend == .gpu && files != \.plainFunctions
    }

    /// The multiplications between two boundaries of the head. A CPU of 11 GFLOPS does them in 0.2 s, a multiplication and an addition being two
    /// operations. A GPU of 350 GFLOPS does its larger number in as long; there a boundary is a round trip.
    var workBetweenBoundaries: Int { backend == .cpu ? 1 << 30 : 1 << 35 }

    /// Whether MLX encodes the next part of a formula while one is computed.
    var chainsParts: Bool { backend == .gpu }
}

extension Backend {
    /// The processor that computes a bundle for this device.
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
