import Foundation
import MLX
import MeSPBundle
import MeSPFiles
import MeSPSentences

package struct LoadedAdapters {
    package let rank: Int
    package let scale: Float
    /// One flat vector `[P]` of LoRA parameters for each block.
    package let lora: [MLXArray]
    package let layouts: [LoRALayout]

    package var bytes: Int { layouts.reduce(0) { $0 + 4 * $1.count } }

    package init(rank: Int, scale: Float, lora: [MLXArray], layouts: [LoRALayout]) {
        (self.rank, self.scale, self.lora, self.layouts) = (rank, scale, lora, layouts)
    }
}

/// Writes a folder of adapters that mlx-lm and mlx-swift-lm load, with a subfolder `peft` in PEFT's format.
///
/// Existing files are replaced only after all new files are written.
///
/// - Parameters:
///   - blocks: the trained blocks, which end with the last block of the model.
///   - modules: the trained modules of these blocks. A layer without a trained module is not written.
///   - strength: the factor by which each B is multiplied.
///   - magnitudes: with DoRA, returns the norms of W's rows, `[magnitudes]`, for the modules of a layout. An untrained module that is written gets
///     these norms as m.
package func saveAdapterFolder(
    _ architecture: Architecture, rank: Int, blocks: Range<Int>, modules: [Module], scale: Float, model: String,
    strength: Float = 1, dropout: Float = 0,
    magnitudes: ((_ block: Int, LoRALayout) throws -> MLXArray)? = nil, to folder: URL,
    lora: @escaping (_ block: Int) throws -> MLXArray
) throws {
    let isDoRA = magnitudes != nil
    func matrices(_ module: Module, _ block: Int, _ layout: LoRALayout) throws -> LoRAMatrices {
        if layout.modules.contains(module) { return layout.matrices(module, in: try lora(block)) }
        let own = LoRALayout(block: layout.block, rank: rank, modules: [module], hasMagnitudes: isDoRA)
        return own.matrices(module, in: own.base(try magnitudes?(block, own) ?? MLXArray.zeros([0])))
    }
    func tensors(_ format: AdapterFormat) -> [NewTensor] {
        blocks.flatMap { block in
            let layout = LoRALayout(
                block: architecture.block(block), rank: rank, modules: modules, hasMagnitudes: isDoRA)
            let layers = format.layers(of: layout.block).filter { $0.modules.contains(where: layout.modules.contains) }
            return layers.flatMap { layer -> [NewTensor] in
                let (a, b) = layout.block.shapes(layer.modules, rank: rank * layer.modules.count)
                var parts = [("A", a, \LoRAMatrices.a, Float(1)), ("B", b, \.b, strength)]
                if isDoRA { parts.append(("m", Array(b.suffix(1)), \.magnitudes, 1)) }
                return parts.map { matrix, shape, path, factor in
                    NewTensor(
                        name: format.name(matrix, layer, block, of: architecture),
                        shape: format.turned(shape, matrix), dtype: .float32
                    ) {
                        let joined = layer.joined(try layer.modules.map { try matrices($0, block, layout) })
                        return format.turned(joined[keyPath: path].asType(.float32) * factor, matrix)
                    }
                }
            }
        }
    }
    func files(_ format: AdapterFormat, in folder: URL) throws -> [(url: URL, write: (FileHandle) throws -> Void)] {
        try makeFolder(folder)
        let matrices = try safetensors(tensors(format), metadata: ["format": "pt"])
        let config = format.config(
            rank: rank, scale: Double(scale), dropout: Double(dropout), isDoRA: isDoRA, blocks: blocks,
            of: architecture, modules: modules, model: model)
        let json = try JSONSerialization.data(withJSONObject: config, options: [.prettyPrinted, .sortedKeys])
        return [
            (folder.appendingPathComponent(format.file), matrices),
            (folder.appendingPathComponent(AdapterFormat.configFile), { try $0.write(contentsOf: json) }),
        ]
    }
    try explaining {
        try writeWhole(files(.mlx, in: folder) + files(.peft, in: folder.appendingPathComponent("peft")))
    } as: {
        "Cannot save the adapters in \(folder.path): \($0)."
    }
}

/// Reads a folder of adapters in the format of mlx-lm or PEFT.
///
/// - Parameters:
///   - withExperts: whether the vectors include experts' matrices even if the folder has none.
///   - onlyB: whether a module may have B without A.
///   - absent: returns parameters `[P]` of a block, for the matrices that the folder lacks. The default is zeros.
package func loadAdapters(
    from folder: URL, architecture: Architecture, withExperts: Bool = false, onlyB: Bool = false,
    absent: (LoRALayout, _ block: Int) throws -> MLXArray = { layout, _ in MLXArray.zeros([layout.count]) }
) throws -> LoadedAdapters {
    var reader = try AdapterReader(folder, of: architecture, withExperts: withExperts)
    let lora = try reader.layouts.enumerated().map { block, layout in
        try reader.read(block, onlyB: onlyB, absent: try absent(layout, block))
    }
    try reader.checkEnd()
    return LoadedAdapters(rank: reader.rank, scale: reader.scale, lora: lora, layouts: reader.layouts)
}

struct AdapterReader {
    private(set) var layouts = [LoRALayout]()
    var rank: Int { config.rank }
    var scale: Float { config.scale }
    private let folder: URL
    private let architecture: Architecture
    private let config: AdapterConfig
    private let tensors: Safetensors
    private let prefix: String
    /// The names of the tensors that have not been read.
    private var names: Set<String>
    private var format: AdapterFormat { config.format }

    init(_ folder: URL, of architecture: Architecture, withExperts: Bool = false) throws {
        (self.folder, self.architecture) = (folder, architecture)
        (config, tensors) = try Self.naming(folder) {
            let config = try AdapterConfig(folder, of: architecture)
            guard config.rank <= architecture.hiddenSize else {
                throw MeSPError("their rank, \(config.rank), is above the model's width of \(architecture.hiddenSize)")
            }
            let file = config.format.file
            let tensors = try Safetensors(folder.appendingPathComponent(file))
            guard !tensors.names.isEmpty else { throw MeSPError("\(file) is empty") }
            return (config, tensors)
        }
        names = tensors.names
        let (format, prefix) = (config.format, config.format.prefix(of: architecture, in: names))
        self.prefix = prefix
        let hasExperts = architecture.layers.indices.contains { block in
            format.layers(of: architecture.block(block)).contains {
                $0.isStacked && names.contains(tensor("B", $0, block))
            }
        }
        try Self.naming(folder) {
            if config.isDoRA && hasExperts { throw AdapterFormat.unsupported("DoRA for experts") }
        }
        layouts = architecture.layouts(
            rank: config.rank, withExperts: withExperts || hasExperts, hasMagnitudes: config.isDoRA)
    }

    private static func naming<R>(_ folder: URL, _ body: () throws -> R) throws -> R {
        try explaining(body, as: { "Cannot load the adapters in \(folder.path): \($0)." })
    }

    mutating func read(_ block: Int, onlyB: Bool = false, absent: MLXArray? = nil) throws -> MLXArray {
        try Self.naming(folder) {
            let layout = layouts[block]
            let absent = absent ?? MLXArray.zeros([layout.count])
            var matrices = [String: LoRAMatrices]()
            for layer in format.layers(of: layout.block) where layer.modules.allSatisfy(layout.modules.contains) {
                let shapes = layout.block.shapes(
                    layer.modules, rank: config.joins ? rank * layer.modules.count : rank)
                let a = try take("A", layer, block, shapes.a)
                let b = try take("B", layer, block, shapes.b)
                let m = config.isDoRA ? try take("m", layer, block, shapes.b.suffix(1)) : nil
                let all = [("A", a), ("B", b)] + (config.isDoRA && !layer.isStacked ? [("m", m)] : [])
                let missing = all.filter { $0.1 == nil }.map(\.0)
                guard missing.isEmpty || missing.count == all.count || (onlyB && missing == ["A"]) else {
                    throw MeSPError("\(tensor(missing[0], layer, block)) is missing")
                }
                let parts = zip(
                    layer.modules, layer.parts(a: a, b: b, m: m, rank: rank, joins: config.joins, in: layout.block)
                ).map { module, part in
                    let initial = layout.matrices(module, in: absent)
                    return LoRAMatrices(a: part.a ?? initial.a, b: part.b ?? initial.b, m: part.m ?? initial.m)
                }
                if config.joins, let b {
                    try AdapterFormat.checkRanks(layer.joined(parts).b.arrayEqual(b).number(Bool.self))
                }
                for (module, part) in zip(layer.modules, parts) { matrices[module.name] = part }
            }
            let flat = layout.packed(layout.modules.compactMap { matrices[$0.name] })
            eval(flat)
            return flat
        }
    }

    func checkEnd() throws {
        try Self.naming(folder) {
            if let name = names.min() {
                throw MeSPError("it holds \(name), which is not a LoRA matrix of one of this model's layers")
            }
        }
    }

    private func tensor(_ matrix: String, _ layer: AdaptedLayer, _ block: Int) -> String {
        let others = format.layers(of: architecture.block(block)).filter { $0.isStacked && $0.name != layer.name }
        let isNested = others.contains { config.adaptsParameter("\(prefix).layers.\(block).\($0.name)") }
        let name = format.name(matrix, layer, block, of: architecture, prefix: prefix, isNested: isNested)
        // PEFT reads magnitudes with and without the suffix `.weight`.
        return matrix == "m" && tensors.shape("\(name).weight") != nil ? "\(name).weight" : name
    }

    private mutating func take(
        _ matrix: String, _ layer: AdaptedLayer, _ block: Int, _ shape: [Int]
    ) throws -> MLXArray? {
        let name = tensor(matrix, layer, block)
        guard names.remove(name) != nil, let found = tensors.shape(name) else { return nil }
        guard try config.adapts(layer, block, prefix: prefix) else {
            throw MeSPError("it holds \(name), which its \(AdapterFormat.configFile) gives no place")
        }
        guard found == format.turned(shape, matrix), let array = tensors[name] else {
            throw MeSPError(
                "\(name) has the shape \(found), where the model needs \(format.turned(shape, matrix))")
        }
        // 0 · x is NaN if x is infinite or NaN.
        guard try (array.asType(.float32) * 0).sum().number(Float.self) == 0 else {
            throw MeSPError("\(name) has numbers that are not finite; train them again")
        }
        return format.turnedBack(array, matrix, to: shape)
    }
}

extension LoRAMatrices {
    fileprivate var magnitudes: MLXArray {
        guard let m else { preconditionFailure("no magnitudes in the layout") }
        return m
    }
}
