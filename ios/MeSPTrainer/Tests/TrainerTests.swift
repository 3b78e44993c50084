import Foundation
import MLX
import Testing

@testable import MeSPCore

/// The trainer against `mesp.reference`. `tests/make_fixtures.py` makes a bundle and what the reference computes on it; `make test`
/// names their folder in `MESP_FIXTURES`.
@Suite(.serialized) struct TrainerTests {
    /// Every case is a folder with `bundle.mesp`, `gradients.safetensors` and `losses.safetensors`.
    static let cases: [URL] = {
        guard let path = ProcessInfo.processInfo.environment["MESP_FIXTURES"] else { return [] }
        let folders = try? FileManager.default.contentsOfDirectory(
            at: URL(fileURLWithPath: path), includingPropertiesForKeys: nil)
        return (folders ?? []).sorted { $0.path < $1.path }
    }()

    @Test func fixturesAreThere() {
        #expect(!Self.cases.isEmpty, "run the tests with `make test`, which makes the fixtures")
    }

    /// Different order of summation in float32; the bar of the design is 1e-4.
    private let tolerance: Float = 1e-4

    @Test(arguments: cases) func gradientsEqualTheReference(_ folder: URL) throws {
        let fixture = try Fixture(folder, "gradients")
        for method in [Method.mesp, .mebp] {
            let trainer = try fixture.trainer(method)
            trainer.load(try (0..<fixture.layers).map { try fixture.array("lora.\($0)") })
            var gradients = [Int: MLXArray]()
            let loss = try trainer.backpropagate(fixture.tokens(), method: method) { gradients[$0] = $1 }

            #expect(relativeError(MLXArray([loss]), try fixture.array("loss")) < tolerance)
            for (block, gradient) in gradients {
                let expected = try fixture.array("grad.\(block)")
                for projection in Projection.allCases {
                    let ours = trainer.layout.matrices(projection, in: gradient)
                    let reference = trainer.layout.matrices(projection, in: expected)
                    let name = "\(method) block \(block) \(projection)"
                    #expect(relativeError(ours.a, reference.a) < tolerance, "\(name).A")
                    #expect(relativeError(ours.b, reference.b) < tolerance, "\(name).B")
                }
            }
            #expect(gradients.count == fixture.layers)
        }
    }

    /// Tiles, kept intermediates and offloading change nothing but the order of sums.
    @Test(arguments: cases) func everyPlanGivesTheSameGradients(_ folder: URL) throws {
        let fixture = try Fixture(folder, "gradients")
        for plan in [
            Plan(tileBytes: 1 << 10), Plan(tileBytes: 1 << 24), Plan(tileBytes: 1 << 20, keptBlocks: 1),
            Plan(tileBytes: 1 << 14, keptBlocks: fixture.layers),
            Plan(tileBytes: 1 << 16, keptBlocks: 1, offload: true),
        ] {
            let trainer = try fixture.trainer(.mesp, plan: plan)
            trainer.load(try (0..<fixture.layers).map { try fixture.array("lora.\($0)") })
            let loss = try trainer.backpropagate(fixture.tokens(), method: .mesp) { block, gradient in
                let error = relativeError(gradient, try fixture.array("grad.\(block)"))
                #expect(error < tolerance, "block \(block), \(plan)")
            }
            #expect(relativeError(MLXArray([loss]), try fixture.array("loss")) < 1e-5, "\(plan)")
            #expect((trainer.writtenBytes > 0) == plan.offload)
        }
    }

    @Test(arguments: cases) func lossesOfTrainingEqualTheReference(_ folder: URL) throws {
        let fixture = try Fixture(folder, "losses")
        let rate = try fixture.number("learning_rate")
        let stream = try #require(try fixture.bundle.tokens("train"))
        for method in Method.allCases {
            let trainer = try fixture.trainer(method)
            let expected = try fixture.array(method.rawValue).asArray(Float.self)
            for (step, reference) in expected.enumerated() {
                let tokens = stream.trainingWindow(step: step, seed: 0, length: fixture.length)
                let loss =
                    method == .mezo
                    ? try trainer.zerothOrderStep(
                        tokens, epsilon: try fixture.number("mezo_epsilon"),
                        learningRate: try fixture.number("mezo_learning_rate"), seed: UInt64(1 + step))
                    : try trainer.step(tokens, method: method, learningRate: rate)
                #expect(abs(loss - reference) < tolerance * reference, "\(method) step \(step + 1)")
            }
        }
    }
}

/// ‖a − b‖₂ / ‖b‖₂
func relativeError(_ a: MLXArray, _ b: MLXArray) -> Float {
    ((a - b).square().sum().sqrt() / b.square().sum().sqrt()).item(Float.self)
}

private struct Fixture {
    let bundle: ModelBundle
    private let arrays: [String: MLXArray]
    private let metadata: [String: String]

    init(_ folder: URL, _ name: String) throws {
        bundle = try ModelBundle(url: folder.appendingPathComponent("bundle.mesp"))
        (arrays, metadata) = try loadArraysAndMetadata(url: folder.appendingPathComponent("\(name).safetensors"))
    }

    var layers: Int { bundle.architecture.numHiddenLayers }
    var length: Int { metadata["seq_len"].flatMap(Int.init) ?? 0 }

    func array(_ name: String) throws -> MLXArray { try #require(arrays[name], "no \(name) in the fixture") }

    func number(_ name: String) throws -> Float { try #require(metadata[name].flatMap(Float.init), "no \(name)") }

    func tokens() throws -> ArraySlice<Int32> { try array("tokens").asArray(Int32.self)[...] }

    func trainer(_ method: Method, plan: Plan = Plan(tileBytes: 1 << 20)) throws -> Trainer {
        let rank = Int(try number("rank"))
        return try Trainer(
            bundle: bundle, method: method, length: length, rank: rank, alpha: try number("alpha"), seed: 0, plan: plan,
            folder: FileManager.default.temporaryDirectory)
    }
}
