import Foundation
import MLX
import MeSPBundle

/// Makes what a training keeps from step to step and between its passes: arrays in memory or, as the plan says, in files.
struct TrainingArrays {
    let plan: Plan
    private let bundle: ModelBundle
    private let settings: RunSettings
    private let folder: URL
    private let layouts: [LoRALayout]

    /// - Parameter folder: where files are made, if the plan asks for any.
    init(_ bundle: ModelBundle, _ settings: RunSettings, _ plan: Plan, in folder: URL) {
        (self.bundle, self.settings, self.plan, self.folder) = (bundle, settings, plan, folder)
        layouts = settings.layouts(of: bundle.architecture)
    }

    /// The file of block inputs; nil for memory.
    func inputsFile() throws -> ArrayFile? {
        guard plan.offload != .none, settings.method.hasBackwardPass else { return nil }
        return try file([1, settings.seqLen, bundle.architecture.hiddenSize], bundle.dtype)
    }

    /// An array of zeros for each trained block, by default of its gradient's shape.
    ///
    /// - Parameter shape: of a block with this number of trained parameters.
    func zeros(_ shape: (_ parameters: Int) -> [Int] = { [$0] }, _ dtype: DType = .float32) throws -> BlockArrays {
        try arrays(shape, dtype: dtype) { _, layout in MLXArray.zeros(shape(layout.trainedCount), dtype: dtype) }
    }

    /// The parameters of the settings' seed.
    func initial() throws -> BlockArrays {
        let dtype = settings.loraDtype.dtype
        return try arrays(dtype: dtype) { $1.initial(seed: settings.seed, block: $0).asType(dtype) }
    }

    /// The parameters that the run began with, where answers are compared with that model or an update is held near it; nil elsewhere and
    /// without adapters.
    func start() throws -> BlockArrays? {
        guard settings.keepsStart, let folder = settings.adapters else { return nil }
        let adapters = try settings.loadAdapters(
            from: URL(fileURLWithPath: folder), architecture: bundle.architecture)
        return try arrays { $1.part(of: adapters.lora[$0], in: adapters.layouts[$0]) }
    }

    private func arrays(
        _ shape: (_ parameters: Int) -> [Int] = { [$0] }, dtype: DType = .float32,
        _ make: (_ block: Int, LoRALayout) throws -> MLXArray
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

    private func file(_ shape: [Int], _ dtype: DType) throws -> ArrayFile {
        try ArrayFile(in: folder, shape: shape, dtype: dtype, keepsMaps: bundle.backend == .cpu || plan.keepsMaps)
    }
}
