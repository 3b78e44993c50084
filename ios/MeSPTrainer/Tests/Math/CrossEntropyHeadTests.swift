import Foundation
import MLX
import Testing

@testable import MeSPBundle
@testable import MeSPCore

@Suite(.serialized) struct CrossEntropyHeadTests {
    private struct Ended: Error {}

    /// Calls `body` with a head with tiles of 8 rows, and with y `[1, n, hidden]` in the bundle's dtype.
    private func withHead<R>(
        _ bundle: ModelBundle, work: Int = .max, y: (PackedWeights, Architecture) -> MLXArray,
        _ body: (CrossEntropyHead, MLXArray) throws -> R
    ) throws -> R {
        try bundle.withHead { weights in
            var schedule = Schedule(bundle.processor, bytes: 1 << 20)
            schedule.vocabularyRows = 8
            let head = CrossEntropyHead(weights: weights, architecture: bundle.architecture, schedule: schedule)
            let y = y(weights, bundle.architecture).asType(bundle.dtype).expandedDimensions(axis: 0)
            MLX.eval(y)
            return try Schedule.$mostWork.withValue(work) { try body(head, y) }
        }
    }

    @Test(arguments: Fixture.cases + Fixture.roundedCases) func aConfidentTokensLossIsNotNegative(_ folder: URL) throws
    {
        let targets = MLXArray([0, 1, 7, 8, 100, 200, 319] as [Int32])
        func rows(_ weights: PackedWeights, _ a: Architecture) -> MLXArray {
            weights.matrix("", inputs: a.hiddenSize).take(targets) / weights["norm"]
        }
        try withHead(try Fixture(folder, "gradients").bundle, y: rows) { head, y in
            let formula = head.formula
            let z = matmul(formula.norm(y[0].asType(.float32)), formula.weight.inFloat32.T)
            let logits = formula.cap.map { tanh(z / $0) * $0 } ?? z
            for (row, target) in targets.asArray(Int32.self).enumerated() {
                let loss = head.loss(y, targets: [target], counted: [row]) {}
                let expected = logits[row].logSumExp() - logits[row, Int(target)]
                #expect(loss.item(Float.self) >= 0)
                #expect(abs((loss - expected).item(Float.self)) < 2e-5)
            }
        }
    }

    @Test(arguments: Fixture.cases) func aDivergenceIsThatOfAllWords(_ folder: URL) throws {
        func noise(_ weights: PackedWeights, _ a: Architecture) -> MLXArray {
            MLXRandom.normal([6, a.hiddenSize], key: MLXRandom.key(0))
        }
        try withHead(try Fixture(folder, "gradients").bundle, y: noise) { head, y in
            let both = [y[0][..<3], y[0][3...]]
            let logs = both.map { y in
                let z = head.logits(y)
                return z - z.logSumExp(axis: -1)[0..., .newAxis]
            }
            let expected = (exp(logs[0]) * (logs[0] - logs[1])).sum(axis: -1)
            #expect(relativeError(head.divergences(both[0], both[1]) {}, expected) < 1e-4)
        }
    }

    @Test(arguments: [Fixture.tied, Fixture.roundedCases.first].compactMap { $0 })
    func waitsBetweenTiles(_ folder: URL) throws {
        let targets: [Int32] = [3, 9, 64]
        func noise(_ weights: PackedWeights, _ a: Architecture) -> MLXArray {
            MLXRandom.normal([5, a.hiddenSize], key: MLXRandom.key(0))
        }
        let bundle = try Fixture(folder, "gradients").bundle
        let a = bundle.architecture
        func run(tilesBetween: Int) throws -> (boundaries: Int, loss: Float, dy: [Float], tiles: Int) {
            let tileWork = 2 * targets.count * a.hiddenSize * 8
            return try withHead(bundle, work: tilesBetween * tileWork, y: noise) { head, y in
                var boundaries = 0
                let (loss, dy) = head.lossAndGradient(y, targets: targets, counted: [0, 2, 3], scale: 0.5) {
                    boundaries += 1
                    MLX.eval(MLXArray.ones([64, 64]).matmul(MLXArray.ones([64, 64])))
                    Memory.clearCache()
                }
                let values = dy.asType(.float32).asArray(Float.self)
                return (boundaries, loss.item(Float.self), values, a.vocabSize / 8)
            }
        }
        let never = try run(tilesBetween: 1 << 20)
        #expect(never.boundaries == 0)
        for tilesBetween in [1, 3] {
            let waiting = try run(tilesBetween: tilesBetween)
            #expect(waiting.boundaries == (waiting.tiles - 1) / tilesBetween)
            #expect(waiting.loss == never.loss && waiting.dy == never.dy)
        }
        // If `tilesBetween` is 0, there is a boundary after each tile except the last.
        #expect(try run(tilesBetween: 0).boundaries == never.tiles - 1)
    }

    @Test func endsAtABoundary() throws {
        func zeros(_ weights: PackedWeights, _ a: Architecture) -> MLXArray { MLXArray.zeros([1, a.hiddenSize]) }
        _ = try withHead(try Fixture(try #require(Fixture.tied), "gradients").bundle, work: 1, y: zeros) { head, y in
            #expect(throws: Ended.self) {
                try head.lossAndGradient(y, targets: [0], counted: [0], scale: 1) { throw Ended() }
            }
        }
    }
}
