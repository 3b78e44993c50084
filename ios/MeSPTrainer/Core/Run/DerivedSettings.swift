import MLX
import MeSPBundle

extension RunSettings {
    package var scale: Float { Float(Double(alpha) / (rslora ? Double(rank).squareRoot() : Double(rank))) }

    var sequences: Int { batchSize * gradAccumulationSteps * (groupSize ?? 1) }

    var processor: Processor { (device ?? .standard).processor }

    /// Whether steps need formulas, because block functions have no inputs for dropout masks and DoRA's magnitudes.
    var needsFormulas: Bool { dropout > 0 || dora }

    /// Returns the blocks that a step (from 0) updates, of those that are trained. `blocksPerStep` cuts them into groups of neighbours of about the same
    /// size. Each group has a turn in every round, in an order drawn from the seed.
    func drawBlocks(of trained: [Int], step: Int) -> [Int] {
        guard let share = blocksPerStep else { return trained }
        let most = max(1, Int(whole: (share * Double(trained.count)).rounded()))
        let groups = (trained.count + most - 1) / most
        let round = step / groups * groups
        let order = (0..<groups).sorted { [seed = scattered(seed)] in
            scattered(seed &+ UInt64(round + $0)) < scattered(seed &+ UInt64(round + $1))
        }
        let group = order[step - round]
        return Array(trained[group * trained.count / groups..<(group + 1) * trained.count / groups])
    }

    var keepsStart: Bool { adapters != nil && (objective?.hasReference == true || proximalMu != nil) }
}

extension RunSettings.LoRADtype {
    var dtype: DType { self == .float32 ? .float32 : .bfloat16 }
}

extension GradientMethod {
    var hasBackwardPass: Bool { self != .mezo }

    var readsIntermediates: Bool { self == .mesp }

    package var takesPacked: Bool { self != .mebp }
}

extension Objective {
    var takesPairs: Bool { self != .kto }

    var hasReference: Bool { self == .dpo || self == .ipo || self == .kto }
}
