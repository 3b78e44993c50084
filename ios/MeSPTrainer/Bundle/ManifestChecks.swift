import Foundation
import MeSPFiles
import MeSPSentences

extension Manifest {
    /// Throws unless the manifest is consistent. For example, sizes must be within bounds, all named files must be listed, and all arrays must fit
    /// their files.
    func check(_ bundle: String) throws {
        try checkDimensions(bundle)
        try checkFiles(bundle)
        try checkLayout(bundle)
    }

    private func checkDimensions(_ bundle: String) throws {
        let perLayer = [perLayerEmbedding, perLayerProjection].compactMap { $0 }
        let lengths = blocks.map(\.words) + ([embedding, head] + perLayer).map(\.words)
        let layers = blocks.flatMap(\.layers).sorted()
        guard architecture.isConsistent,
            lengths.allSatisfy({ (1...(1 << 31)).contains($0) }),
            !seqLens.isEmpty, seqLens.allSatisfy({ (1...(1 << 20)).contains($0) }),
            !ranks.isEmpty, ranks.allSatisfy({ $0 > 0 }),
            layers == Array(0..<architecture.numHiddenLayers),
            perLayer.count == (architecture.perLayer == nil ? 0 : 2),
            blocks.allSatisfy({
                Set($0.layers.map { [architecture.layers[$0], architecture.mlpLayers[$0]] }).count == 1
            })
        else { throw MeSPError("\(bundle): the manifest's dimensions don't fit together; export the bundle again.") }
        if let rank = ranks.max(), rank > architecture.largestRank {
            throw MeSPError(
                "\(bundle): the manifest has rank \(rank), and the model's matrices have at most rank \(architecture.largestRank); export the bundle again."
            )
        }
        let shown = [name, model.id, model.revision, model.license, model.licenseName, model.licenseLink]
        guard shown.compactMap({ $0 }).allSatisfy(\.isPrintable) else {
            throw MeSPError(
                "\(bundle): a name in the manifest has characters that cannot be shown; export the bundle again.")
        }
        let ends = endTokens ?? []
        guard ends.allSatisfy({ (0..<architecture.vocabSize).contains($0) }), Set(ends).count == ends.count else {
            throw MeSPError("\(bundle): the manifest's end_tokens are not different tokens; export the bundle again.")
        }
    }

    private func checkFiles(_ bundle: String) throws {
        for file in files {
            guard leadsDown(file.path), file.path != "manifest.json", (0...(1 << 40)).contains(file.size) else {
                throw MeSPError(
                    "\(bundle): the manifest names \(file.path), which no bundle has; do not use the bundle.")
            }
        }
        let listed = Set(files.map(\.path))
        guard listed.count == files.count else {
            throw MeSPError("\(bundle): the manifest names a file twice; do not use the bundle.")
        }
        for blocks in blocks {
            let kinds = [blocks.functions, blocks.plainFunctions, blocks.packedFunctions ?? blocks.functions]
            guard kinds.contains(where: { !$0.isEmpty }) else { continue }
            for length in seqLens where kinds.contains(where: { $0["\(length)"] == nil }) {
                throw MeSPError(
                    "\(bundle): the manifest has no function for \(length) tokens; export the bundle again.")
            }
        }
        let functions = blocks.flatMap {
            [$0.functions, $0.plainFunctions, $0.packed].flatMap(\.values)
        }
        let named = functions + weightFiles.map(\.file) + (data ?? [:]).values.flatMap { $0.parts.map(\.file) }
        if let path = named.first(where: { !listed.contains($0) }) {
            throw MeSPError("\(bundle): the manifest does not list \(path); export the bundle again.")
        }
    }

    private func checkLayout(_ bundle: String) throws {
        let sizes = Dictionary(uniqueKeysWithValues: files.map { ($0.path, $0.size) })
        for file in weightFiles where sizes[file.file] != file.words * 4 {
            throw MeSPError("\(file.file) in \(bundle) doesn't have the length of its layout; export the bundle again.")
        }
        let stored: Set<ElementType> = [.float32, .float16, .bfloat16]
        func check(_ file: PackedFile, plain: [Weight] = [], matrices: [Weight], separator: String = "") throws {
            func array(
                _ name: String, _ dtypes: Set<ElementType>, isStacked: Bool = false, fits: ([Int]) -> Bool
            ) throws -> PackedArray {
                guard let array = file.arrays.first(where: { $0.name == name }), dtypes.contains(array.dtype),
                    fits(array.shape), array.shape.allSatisfy({ (1...(1 << 24)).contains($0) }),
                    (array.stride != nil) == isStacked, array.isWithin(file.words)
                else { throw wrong(name) }
                return array
            }
            func wrong(_ name: String) -> MeSPError {
                MeSPError("\(bundle): the manifest's entry for \(name) is missing or wrong; export the bundle again.")
            }
            for expected in plain {
                _ = try array(expected.name, expected.isFloat32 ? [.float32] : stored) { $0 == expected.shape }
            }
            for matrix in matrices {
                let (name, last) = (matrix.name + separator, matrix.shape.count - 1)
                let hasBiases = file.arrays.contains { $0.name == name + "biases" }
                let isTable = { (shape: [Int]) in
                    shape.count == last + 1 && shape.dropLast() == matrix.shape.dropLast()
                }
                let isStacked = last > 1
                let weight = try array(name + "weight", [.uint32], isStacked: isStacked, fits: isTable)
                let scales = try array(
                    name + "scales", hasBiases ? stored : [.uint8], isStacked: isStacked, fits: isTable)
                if hasBiases {
                    _ = try array(name + "biases", [scales.dtype], isStacked: isStacked) { $0 == scales.shape }
                }
                let format = QuantizationFormat(
                    inputs: matrix.shape[last], words: weight.shape[last], groups: scales.shape[last],
                    hasBiases: hasBiases)
                guard format != nil else { throw wrong(name + "weight") }
            }
        }
        for kind in blocks {
            let block = architecture.block(kind.layers[0])
            try check(kind.file(kind.layers[0]), plain: block.plainArrays, matrices: block.matrices, separator: ".")
        }
        let table = [Weight(name: "", shape: [architecture.vocabSize, architecture.hiddenSize])]
        try check(embedding, matrices: table)
        try check(head, plain: [Weight(name: "norm", shape: [architecture.hiddenSize])], matrices: table)
        guard let size = architecture.perLayer?.size, let perLayerEmbedding, let perLayerProjection else { return }
        let width = architecture.numHiddenLayers * size
        try check(perLayerEmbedding, matrices: [Weight(name: "", shape: [architecture.vocabSize, width])])
        // Each layer's part of the embedding table must consist of whole quantization groups.
        let groups = perLayerEmbedding.arrays.first { $0.name == "scales" }?.shape[1] ?? 1
        guard size % (width / groups) == 0 else {
            throw MeSPError("\(bundle): the manifest's dimensions don't fit together; export the bundle again.")
        }
        try check(
            perLayerProjection, plain: [Weight(name: "norm", shape: [size])],
            matrices: [Weight(name: "", shape: [width, architecture.hiddenSize])])
    }
}

/// Returns whether a path is relative and has no empty part, no part `.` or `..`, and no null character. Symbolic links are not resolved.
package func leadsDown(_ path: String) -> Bool {
    let parts = path.split(separator: "/", omittingEmptySubsequences: false)
    return !parts.contains { $0.isEmpty || $0 == ".." || $0 == "." || $0.contains("\0") }
}

/// Returns whether a path stays within `folder` and none of its folders is a symbolic link.
func isPath(_ path: String, within folder: URL) -> Bool {
    guard leadsDown(path) else { return false }
    let parent = path.split(separator: "/").dropLast().joined(separator: "/")
    return folder.appendingPathComponent(parent).resolvingSymlinksInPath().path
        == folder.resolvingSymlinksInPath().appendingPathComponent(parent).path
}
