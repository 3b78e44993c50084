import Foundation
import MLX
import MeSPSentences
import Testing

@testable import MeSPAdapters
@testable import MeSPBundle
@testable import MeSPCore

func relativeError(_ a: MLXArray, _ b: MLXArray) -> Float {
    ((a - b).square().sum().sqrt() / b.square().sum().sqrt()).item(Float.self)
}

/// A bundle and the Python reference's results on it, written by `tests/fixtures/make_cases.py` to the folder `MESP_FIXTURES`.
struct Fixture {
    /// The folders of the float32 cases, each with `bundle.mesp`, `gradients.safetensors` and `losses.safetensors`.
    static let cases = folders.filter { !$0.lastPathComponent.hasSuffix("bfloat16") }

    static let roundedCases = folders.filter { !cases.contains($0) }

    static let noisyCases = roundedCases.filter {
        ["wide", "qwen3_5"].contains(where: $0.lastPathComponent.hasPrefix)
    }

    private static let folders: [URL] = {
        guard let path = ProcessInfo.processInfo.environment["MESP_FIXTURES"] else { return [] }
        let folders = try? FileManager.default.contentsOfDirectory(
            at: URL(fileURLWithPath: path), includingPropertiesForKeys: nil)
        return (folders ?? []).sorted { $0.path < $1.path }
    }()

    static let tied = cases.first { $0.lastPathComponent == "tied-32" }

    let bundle: ModelBundle
    private let arrays: [String: MLXArray]
    private let metadata: [String: String]

    /// - Parameters:
    ///   - onGPU: whether to compute as on a GPU; nil to decide by the folder's name.
    init(_ folder: URL, _ name: String, bundle other: URL? = nil, onGPU: Bool? = nil) throws {
        // Computing checksums would take most of the time in a debug build.
        var bundle = try ModelBundle(url: other ?? folder.appendingPathComponent("bundle.mesp"), checksums: false)
        if onGPU ?? folder.lastPathComponent.contains("gpu") { bundle.backend = .gpu }
        if folder.lastPathComponent.contains("bfloat16") { bundle.dtype = .bfloat16 }
        self.bundle = bundle
        (arrays, metadata) = try loadArraysAndMetadata(url: folder.appendingPathComponent("\(name).safetensors"))
    }

    var exactMethods: [GradientMethod] { bundle.architecture.hasExperts ? [.mesp] : [.mesp, .mebp] }

    var layers: Int { bundle.architecture.numHiddenLayers }
    var length: Int { metadata["seq_len"].flatMap(Int.init) ?? 0 }

    func array(_ name: String) throws -> MLXArray { try #require(arrays[name], "no \(name) in the fixture") }

    func has(_ name: String) -> Bool { arrays[name] != nil }

    func word(_ name: String) throws -> String { try #require(metadata[name], "no \(name) in the fixture") }

    func number(_ name: String) throws -> Float { try #require(metadata[name].flatMap(Float.init), "no \(name)") }

    func example() throws -> Example {
        Example(tokens: try array("tokens").asArray(Int32.self), counted: Array(0..<length))
    }

    func backpropagate(_ trainer: Trainer, into sink: GradientSink) throws -> Float {
        try restore(trainer)
        return try trainer.backpropagate([(example: example(), weight: 1 / Float(length))], into: sink)
    }

    func gradients(_ trainer: Trainer) throws -> Gradients {
        var blocks = [Int: MLXArray]()
        let loss = try backpropagate(trainer) { blocks[$0] = $1 }
        return Gradients(loss: loss, blocks: blocks)
    }

    func expected(_ prefix: String = "") throws -> Gradients {
        let blocks = try (0..<layers).map { ($0, try array("\(prefix)grad.\($0)")) }
        return Gradients(
            loss: try array("\(prefix)loss").item(Float.self), blocks: Dictionary(uniqueKeysWithValues: blocks))
    }

    func expectEqual(
        _ found: Gradients, _ trainer: Trainer, _ name: String = "", prefix: String = "",
        sourceLocation: SourceLocation = #_sourceLocation
    ) throws {
        let expected = try expected(prefix)
        #expect(found.blocks.count == layers, "\(name)", sourceLocation: sourceLocation)
        let tolerance: Float = 1e-4
        #expect(
            abs(found.loss - expected.loss) < tolerance * abs(expected.loss), "\(name)", sourceLocation: sourceLocation)
        for (block, gradient) in found.blocks {
            let layout = trainer.model.lora.layouts[block]
            for (matrix, error) in try layout.errors(gradient, try #require(expected.blocks[block])) {
                #expect(error < tolerance, "\(name) block \(block) \(matrix): \(error)", sourceLocation: sourceLocation)
            }
        }
    }

    func expectRounded(_ trainer: Trainer, _ name: String = "", bar: (_ matrix: String) -> Float) throws -> Float {
        try backpropagate(trainer) { block, gradient in
            let (exact, layout) = (try array("grad.\(block)"), trainer.model.lora.layouts[block])
            let floor = try layout.errors(try array("floor.\(block)"), exact)
            for (matrix, error) in try layout.errors(gradient, exact) {
                let least = try #require(floor[matrix])
                #expect(error <= bar(matrix) * least, "\(name) block \(block) \(matrix): \(error), floor \(least)")
            }
        }
    }

    func expectLosses(
        _ expected: [Float], _ tolerance: Float, _ name: String = "", _ step: (SequenceLoss, Int) throws -> Float
    ) throws {
        let stream = try #require(try bundle.tokens("train")).sequences(lengths: [length])
        for (number, reference) in expected.enumerated() {
            let loss = try step(SequenceLoss([stream.training(number, seed: 0)]), number)
            #expect(abs(loss - reference) < tolerance * reference, "\(name) step \(number): \(loss), \(reference)")
        }
    }

    func saveAdapters(blocks: Range<Int>? = nil, modules: [Module]? = nil, scaledBy factor: Float = 1) throws -> URL {
        let (rank, folder) = (try number("rank"), temporaryFolder())
        let modules = modules ?? bundle.architecture.modules
        try saveAdapterFolder(
            bundle.architecture, rank: Int(rank), blocks: blocks ?? 0..<layers, modules: modules,
            scale: try number("alpha") / rank, model: bundle.manifest.model.id, to: folder
        ) {
            let layout = LoRALayout(block: bundle.architecture.block($0), rank: Int(rank), modules: modules)
            return layout.part(of: try array("lora.\($0)")) * factor
        }
        return folder
    }

    func logits(from first: Int = 0) throws -> MLXArray {
        let y = try array("y")
        return try bundle.withHead { weights in
            let architecture = bundle.architecture
            let h = RMSNorm(weight: weights["norm"], eps: architecture.rmsNormEps)(y[0])
            let all = MLXArray.arange(architecture.vocabSize)
            let w = weights.matrix("", inputs: architecture.hiddenSize).take(all)
            let logits = matmul(h[first...], w.T)
            let capped = architecture.finalLogitSoftcapping.map { tanh(logits / $0) * $0 } ?? logits
            MLX.eval(capped)
            return capped
        }
    }

    func restoreParts(_ trainer: Trainer) throws {
        for block in trainer.model.lora.trained {
            let lora = trainer.model.lora.layouts[block].part(of: try array("lora.\(block)"))
            try trainer.model.lora.vectors.write(lora.asType(trainer.model.settings.loraDtype.dtype), block)
        }
    }

    func restore(_ trainer: Trainer) throws { try SavedState.restore(trainer) { arrays[$0] } }

    func trainer(
        _ method: GradientMethod, plan: Plan = Plan(tileBytes: 1 << 20),
        _ change: (inout RunSettings) throws -> Void = { _ in }
    ) throws -> Trainer {
        var settings = RunSettings(bundle: bundle.url.path, output: "")
        settings.usePaperUpdate()
        (settings.method, settings.seqLen, settings.rank) = (method, length, Int(try number("rank")))
        settings.alpha = try number("alpha")
        settings.mezoEpsilon = (try? number("mezo_epsilon")) ?? settings.mezoEpsilon
        try change(&settings)
        return try Trainer(
            bundle: bundle, settings: settings, plan: plan, folder: FileManager.default.temporaryDirectory)
    }
}

func message(_ body: () throws -> Void) -> String {
    do {
        try body()
        return ""
    } catch {
        return error.plainSentence.english
    }
}

extension RunSettings {
    static func ofATest(_ output: URL, bundle: URL? = nil) throws -> RunSettings {
        let bundle = try bundle ?? tiedBundle()
        let manifest = try ModelBundle(url: bundle).manifest
        var settings = RunSettings(bundle: bundle.path, output: output.path)
        settings.usePaperUpdate()
        settings.seqLen = try #require(manifest.seqLens.max())
        settings.rank = try #require(manifest.ranks.first)
        (settings.steps, settings.learningRate, settings.valBatches) = (6, 0.1, 0)
        return settings
    }
}

struct Gradients {
    var loss: Float
    var blocks: [Int: MLXArray]

    func expectEqual(
        _ expected: Gradients, loss tolerance: Float = 1e-5, _ name: String = "",
        sourceLocation: SourceLocation = #_sourceLocation
    ) throws {
        #expect(abs(loss - expected.loss) < tolerance * abs(expected.loss), "\(name)", sourceLocation: sourceLocation)
        for (block, gradient) in blocks {
            let error = relativeError(gradient, try #require(expected.blocks[block]))
            #expect(error < 1e-4, "\(name) block \(block): \(error)", sourceLocation: sourceLocation)
        }
    }
}

func expectEqual(
    _ found: [String: MLXArray], _ expected: [String: MLXArray], sourceLocation: SourceLocation = #_sourceLocation
) {
    #expect(found.keys == expected.keys, sourceLocation: sourceLocation)
    for (name, array) in expected {
        #expect(found[name]?.arrayEqual(array).item(Bool.self) == true, "\(name)", sourceLocation: sourceLocation)
    }
}

extension LoRALayout {
    func errors(_ gradient: MLXArray, _ expected: MLXArray) throws -> [String: Float] {
        var errors = [String: Float]()
        #expect(gradient.shape == expected.shape && gradient.size == count)
        for module in modules {
            let (ours, reference) = (matrices(module, in: gradient), matrices(module, in: expected))
            errors["\(module.name).A"] = relativeError(ours.a, reference.a)
            errors["\(module.name).B"] = relativeError(ours.b, reference.b)
            guard hasMagnitudes else { continue }
            errors["\(module.name).m"] = relativeError(try #require(ours.m), try #require(reference.m))
        }
        return errors
    }
}

extension BlockwiseModel {
    func matrices() throws -> [LoRAMatrices] {
        try lora.trained.flatMap { block in
            let (layout, vector) = (lora.layouts[block], try lora.parameters(block))
            return layout.modules.map { layout.matrices($0, in: vector) }
        }
    }

    func block(_ index: Int, _ weights: BlockWeights, _ x: MLXArray) throws -> Block {
        Block(
            weights: weights, lora: try lora.parameters(index), layout: lora.layouts[index], scale: lora.scale,
            schedule: work.schedule(length: x.dim(0)))
    }
}
