import Foundation
import MLX
import MeSPAdapters
import MeSPBundle

/// The arrays of a run that last from step to step or from pass to pass, in memory or in files.
struct TrainingArrays {
    let inputsFile: ArrayFile?
    let optimizer: Optimizer
    /// The sums of gradients; nil if gradients are not summed before an update (`Plan.gathersGradients`).
    let sums: BlockArrays?
    let clippedSums: BlockArrays?
    let lora: BlockArrays
    let squaredNorms: BlockArrays?
    let start: BlockArrays?

    init(_ bundle: ModelBundle, _ settings: RunSettings, _ plan: Plan, in folder: URL) throws {
        let (architecture, layouts) = (bundle.architecture, settings.layouts(of: bundle.architecture))
        func file(_ shape: [Int], _ dtype: DType) throws -> ArrayFile {
            try ArrayFile(in: folder, shape: shape, dtype: dtype, keepsMaps: bundle.processor.keepsMaps(plan))
        }
        func arrays(
            _ dtype: DType = .float32, shape: (_ parameters: Int) -> [Int] = { [$0] },
            make: (_ block: Int, LoRALayout) throws -> MLXArray
        ) throws -> BlockArrays {
            let largest = shape(layouts.map(\.count).max() ?? 0)
            var arrays = BlockArrays(
                count: layouts.count, file: plan.offload == .all ? try file(largest, dtype) : nil,
                keepsPrevious: settings.skipBadSteps)
            for (block, layout) in layouts.enumerated() where layout.count > 0 {
                try arrays.write(make(block, layout), block)
            }
            return arrays
        }
        func zeros(_ shape: (_ parameters: Int) -> [Int], _ dtype: DType) throws -> BlockArrays {
            try arrays(dtype, shape: shape) { MLXArray.zeros(shape($1.trainedCount), dtype: dtype) }
        }
        let keepsInputs = plan.offload != .none && settings.method.hasBackwardPass
        inputsFile = keepsInputs ? try file([1, settings.seqLen, architecture.hiddenSize], bundle.dtype) : nil
        optimizer = try Optimizer(settings, zeros: zeros)
        sums = plan.gathersGradients(of: settings) ? try zeros({ [$0] }, .float32) : nil
        clippedSums = settings.dpClip == nil ? nil : try zeros({ [$0] }, .float32)
        let dtype = settings.loraDtype.dtype
        let magnitudes = layouts.map(\.magnitudes).max() ?? 0
        let squares: BlockArrays? =
            settings.dora
            ? try arrays(
                shape: { _ in [magnitudes] },
                make: { block, layout in try bundle.withBlock(block) { $0.squaredNorms(layout) } }) : nil
        squaredNorms = squares
        lora = try arrays(dtype) { block, layout in
            let m = try squares?.read(block)
            return layout.initial(seed: settings.seed, block: block, magnitudes: m.map { sqrt($0) }).asType(dtype)
        }
        start =
            try settings.keepsStart
            ? settings.adapters.map { folder in
                let adapters = try settings.loadAdapters(from: URL(fileURLWithPath: folder), of: bundle)
                return try arrays { $1.part(of: adapters.lora[$0], in: adapters.layouts[$0]) }
            } : nil
    }
}
