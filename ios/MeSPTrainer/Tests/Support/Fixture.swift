import Foundation
import MLX
import MeSPSentences
import Testing

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
        let weight = 1 / Float(length)
        return try trainer.backpropagate([(example: example(), weight: weight)], into: sink)
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

func temporaryFolder() -> URL {
    FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
}

func copyWithoutFunctions(_ bundle: URL) throws -> URL {
    let copy = temporaryFolder()
    try FileManager.default.copyItem(at: bundle.resolvingSymlinksInPath(), to: copy)
    let file = copy.appendingPathComponent("manifest.json")
    let manifest = try String(contentsOf: file, encoding: .utf8)
    try manifest.replacing(#/functions": {[^}]*}/#, with: "functions\": {}").write(
        to: file, atomically: true, encoding: .utf8)
    return copy
}

extension RunSettings {
    static func ofATest(_ output: URL) throws -> RunSettings {
        let bundle = try #require(Fixture.tied).appendingPathComponent("bundle.mesp")
        let manifest = try ModelBundle(url: bundle).manifest
        var settings = RunSettings(bundle: bundle.path, output: output.path)
        settings.usePaperUpdate()
        settings.seqLen = try #require(manifest.seqLens.max())
        settings.rank = try #require(manifest.ranks.first)
        (settings.steps, settings.learningRate, settings.valBatches) = (6, 0.1, 0)
        return settings
    }
}

extension BlockwiseModel {
    func block(_ index: Int, _ weights: BlockWeights, _ x: MLXArray) throws -> Block {
        Block(
            weights: weights, lora: try parameters(index), layout: layouts[index], scale: scale,
            schedule: schedule(x.expandedDimensions(axis: 0)))
    }
}
