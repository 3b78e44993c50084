import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

/// An import of a model in MLX's format (https://huggingface.co/mlx-community).
///
/// The import supports the families in `PlainFamilies`. The bundle's weights equal, byte for byte, the weights that `mesp-export` writes from the
/// same files. The bundle has no exported functions, so the trainer's own formulas compute its blocks.
package struct ModelImport: Sendable {
    /// The bundle's manifest, without the list of copied files and without digests.
    package let manifest: Manifest
    package let notices: [Sentence]

    let folder: URL
    let source: SourceTensors
    let family: PlainFamily
    let entry: [String: JSONValue]
    let config: JSONValue
    let quantizations: Quantizations
    let copied: [String]
    /// A digest of the manifest, of the bundle's config.json, of the copied files, of the names, sizes and modification times of the weight files, and
    /// of the beginning of each tensor. A model with another identity may still have the same weights; `write` compares them.
    let identity: String

    /// The sequence lengths, in tokens, and the ranks of a bundle. Lengths and ranks above the model's limits are left out.
    private static let (lengths, ranks) = ([64, 128, 256, 512, 1024, 2048], [4, 8, 16, 32, 64])

    /// Reads and checks the files in a model's folder.
    ///
    /// - Parameters:
    ///   - model: the folder, with config.json, model*.safetensors and tokenizer.json.
    ///   - id: the model's name on the Hub; nil for the folder's name.
    /// - Throws: `MeSPError` that names an unsupported or damaged part.
    package init(model: URL, id: String? = nil, revision: String? = nil) throws {
        guard FileManager.default.fileExists(atPath: model.appendingPathComponent("config.json").path) else {
            throw MeSPError("\(model.path) is not a Hugging Face model: it has no config.json.")
        }
        let file = try Self.place(of: "config.json", in: model)
        guard let fields = try? readObject(file) else {
            throw MeSPError("\(file.path) cannot be read as a JSON object.")
        }
        folder = model
        let root = model.resolvingSymlinksInPath()
        let id = id ?? root.lastPathComponent
        guard id.isPrintable else {
            throw MeSPError("\(model.path) has characters in its name that cannot be shown; rename it.")
        }
        let readme = try Self.place(of: "README.md", in: model)
        let card = ModelCard(shortFile(readme, longest: Bounds.jsonBytes, followsLinks: true))
        let names = try FileManager.default.contentsOfDirectory(atPath: model.path).sorted()
        let others = ["tokenizer.model", "tekken.json", "tiktoken.model", "spiece.model", "vocab.json"]
        guard names.contains("tokenizer.json") || !names.contains(where: others.contains) else {
            throw MeSPError("\(id) has no tokenizer.json, which only mesp-export can write; take a model that has one.")
        }
        let described = try Description(fields, id: id, source: model.path)
        let source = try described.readTensors(model)
        self.source = source
        let made = try described.entry(isTied: source.isTied, card.fields(id: id, revision: revision), source.dtype)
        (family, entry, quantizations) = (described.config.family, made, described.quantizations)
        config = described.configToWrite(isTied: source.isTied)
        manifest = try Manifest.read(Data(JSONValue.object(entry).json.utf8), of: id)
        guard (try? JSONValue(json: config.json.utf8)) != nil else { throw unusable("numbers") }
        copied = try Self.copied(names, from: model)
        var notices = [Sentence]()
        if quantizations.hasOneBit {
            notices.append(
                "The model has codes of 1 bit, which the bundle stores in 2 bits, with the same values.")
        }
        if source.leftOut > 0 {
            notices.append(
                "\(source.leftOut) tensors are left out: the text alone is trained, without layers that predict several tokens."
            )
            if ["smolvlm", "idefics3"].contains(manifest.architecture.modelType) {
                notices.append("To train on images too, take their features from this model's own vision tower.")
            }
        }
        self.notices = notices
        let files = source.files.map { "\($0.url.lastPathComponent) \($0.size) \($0.modified)" }
        let copies = try copied.map { "\($0) \(sha256(try Self.contents($0, in: model)))" }
        let parts = [JSONValue.object(entry).json, config.json, try source.sample()] + files + copies
        identity = sha256(Data(parts.joined(separator: "\n").utf8))
        for weights in manifest.weightFiles { _ = try arrays(of: weights) }
    }

    /// The size of the bundle's weight files, in bytes, without the tokenizer.
    package var size: Int { manifest.mappedBytes }

    /// Returns the manifest of the bundle that an import of a repository's model would write. The weights need not be downloaded.
    package static func manifest(
        config: Data, card: Data?, of id: String, revision: String?
    ) throws -> Manifest {
        guard config.count <= Manifest.largestSize, let fields = try? JSONValue(json: config).object else {
            throw MeSPError("config.json of \(id) cannot be read as a JSON object.")
        }
        let described = try Description(fields, id: id, source: id)
        // The weight files, which are not there yet, may hold another type.
        let type = described.config["torch_dtype"].string ?? described.config["dtype"].string ?? ""
        let made = try described.entry(
            isTied: described.isTied, ModelCard(card).fields(id: id, revision: revision),
            type.hasSuffix("float16") ? .bfloat16 : .float32)
        return try Manifest.read(Data(JSONValue.object(made).json.utf8), of: id)
    }

    package static func neededFiles(_ names: [String]) -> [String] {
        let weights = names.filter { $0.hasPrefix("model") && $0.hasSuffix(".safetensors") && !$0.contains("/") }
        let whole = weights.filter { $0 == "model.safetensors" }
        let others = ["config.json", "README.md"] + (whole.isEmpty ? ["model.safetensors.index.json"] : [])
        let kept = names.filter {
            others.contains($0) || PlainFamilies.tokenizerFiles.contains($0) || Manifest.isTerms($0)
        }
        return kept + (whole.isEmpty ? weights : whole)
    }

    private struct Description {
        let config: ConfigJSON
        private let name: String
        let quantizations: Quantizations
        private let lengths: [Int]

        init(_ fields: [String: JSONValue], id: String, source: String) throws {
            name = id.split(separator: "/").last.map(String.init) ?? id
            config = try ConfigJSON(fields, of: name, source: source)
            let most = config["max_position_embeddings"].double.flatMap { $0 >= 1 ? Int(whole: min($0, 1e6)) : nil }
            let limit = [most, config.longest].compactMap { $0 }.min() ?? .max
            let possible = ModelImport.lengths.filter { $0 <= limit }
            lengths = possible.isEmpty ? [min(limit, ModelImport.lengths[0])] : possible
            quantizations = try Quantizations(config, of: name, source: source)
        }

        var isTied: Bool { config["tie_word_embeddings"] == .bool(true) }

        func readTensors(_ folder: URL) throws -> SourceTensors {
            let architecture = try config.architecture(length: lengths.max() ?? 1).architecture
            var names: Set = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
            for index in 0..<architecture.numHiddenLayers {
                let block = architecture.block(index)
                let its = block.plainArrays.map(\.name) + block.matrices.map { "\($0.name).weight" }
                names.formUnion(its.map { "model.layers.\(index).\($0)" })
            }
            return try SourceTensors(folder, config, isTied: isTied, known: names)
        }

        /// Returns the manifest, without the list of copied files and without digests.
        ///
        /// - Parameter stored: the type of scales, biases and vectors that the import does not change.
        func entry(
            isTied: Bool, _ model: [String: JSONValue], _ stored: ElementType
        ) throws -> [String: JSONValue] {
            let (described, architecture) = try config.architecture(length: lengths.max() ?? 1, isTied: isTied)
            let hasDivisor = described.object?["logits_scaling"]?.double ?? 1 != 1
            func dtype(_ tensor: String) -> ElementType {
                let isChanged = ModelImport.isNorm(tensor) && config.family.normOffset != 0
                return isChanged || tensor == "model.norm.weight" && hasDivisor ? .float32 : stored
            }
            try checkNumbers(described)
            let layers = 0..<architecture.numHiddenLayers
            let layouts = try layers.map { try BundleLayout(architecture.block($0), $0, quantizations, dtype: dtype) }
            var groups = [[Int]]()
            for layer in layers {
                let same = groups.firstIndex { group in
                    layouts[group[0]] == layouts[layer] && architecture.block(group[0]) == architecture.block(layer)
                }
                if let same { groups[same].append(layer) } else { groups.append([layer]) }
            }
            let embedding = try BundleLayout(
                architecture, table: "model.embed_tokens", quantizations, hasNorm: isTied, dtype: dtype)
            let head =
                isTied
                ? embedding
                : try BundleLayout(architecture, table: "lm_head", quantizations, hasNorm: true, dtype: dtype)
            let headFile = isTied ? "embedding.bin" : "head.bin"
            var sizes = ["embedding.bin": embedding.words * 4]
            sizes[headFile] = head.words * 4
            for layer in layers { sizes[ModelBundle.blockFile(layer)] = layouts[layer].words * 4 }
            let most = architecture.largestRank
            let ranks = ModelImport.ranks.filter { $0 <= most }
            func integers(_ numbers: [Int]) -> JSONValue { .array(numbers.map(JSONValue.integer)) }
            let noFunctions = ["functions": JSONValue.object([:]), "plain_functions": .object([:])]
            return [
                "format": .integer(Manifest.format),
                "name": .string(name),
                "model": .object(model),
                "architecture": described,
                "quantization": quantizations.main.inBundle.entry,
                "seq_lens": integers(lengths),
                "ranks": integers(ranks.isEmpty ? [most] : ranks),
                "blocks": .array(
                    groups.map { group in
                        let layers = ["layers": integers(group)].merging(noFunctions) { $1 }
                        return .object(layers.merging(layouts[group[0]].fields) { $1 })
                    }),
                "embedding": .object(embedding.fields.merging(["file": .string("embedding.bin")]) { $1 }),
                "head": .object(head.fields.merging(["file": .string(headFile)]) { $1 }),
                "data": .object([:]),
                "files": .array(
                    sizes.sorted { $0.key < $1.key }.map { path, size in
                        BundleFile(path: path, size: size, sha256: "").entry
                    }),
            ]
        }

        /// Returns the contents of the bundle's config.json, with the keys and values that mlx-lm reads.
        func configToWrite(isTied: Bool) -> JSONValue {
            var fields = config.fields
            fields["tie_word_embeddings"] = .bool(isTied && config.family.mlxTies)
            for key in ["quantization", "quantization_config"] { fields[key] = fields[key].map(Quantizations.in2Bits) }
            if let usual = config.family.texts.first {
                let text = config.original["text_config"]?.object?["model_type"] ?? .string(usual)
                fields["text_config"] = .object(fields.merging(["model_type": text]) { $1 })
            }
            fields["model_type"] = .string(config.family.mlxType ?? config.modelType)
            fields["quantization"] = quantizations.entry
            return withoutCode(.object(fields))
        }
    }
}

struct BundleFile: Codable {
    let path: String
    let size: Int
    let sha256: String

    var entry: JSONValue {
        .object(["path": .string(path), "size": .integer(size), "sha256": .string(sha256)])
    }
}

func withoutCode(_ value: JSONValue) -> JSONValue {
    switch value {
    case .object(let fields):
        .object(fields.filter { !PlainFamilies.code.contains($0.key) }.mapValues(withoutCode))
    case .array(let values): .array(values.map(withoutCode))
    default: value
    }
}
