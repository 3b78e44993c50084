import MLX

/// A formula, and the schedule by which it is computed in tiles.
struct Tiled<Formula> {
    let formula: Formula
    let schedule: Schedule

    init(_ formula: Formula, _ schedule: Schedule) { (self.formula, self.schedule) = (formula, schedule) }

    func tiled<Other>(_ formula: Other) -> Tiled<Other> { Tiled<Other>(formula, schedule) }
}

extension Tiled where Formula == OutputGate {
    func backward(_ x: MLXArray, dy: MLXArray) -> (dx: MLXArray, dg: MLXArray) {
        let (dx, dg) = formula.backward(x, dy: dy)
        return schedule.part(dx, dg)
    }
}
