import Foundation

extension ModelBundle {
    mutating func checkFiles() throws {
        var needed = [manifest.embedding.file, manifest.head.file]
        for length in manifest.seqLens {
            for blocks in manifest.blocks {
                guard let function = blocks.functions["\(length)"], let plain = blocks.plainFunctions["\(length)"]
                else {
                    throw MeSPError(
                        "\(url.path): the manifest has no function for \(length) tokens; export the bundle again.")
                }
                needed += [function, plain]
            }
        }
        let weights = Set([manifest.embedding.file, manifest.head.file] + blockFiles)
        needed += blockFiles
        needed += (manifest.data ?? [:]).values.flatMap { [$0.file, $0.examples?.file, $0.mask].compactMap { $0 } }
        for path in needed where sizes[path] == nil {
            throw MeSPError("\(url.path): the manifest does not list \(path); export the bundle again.")
        }
        let root = url.resolvingSymlinksInPath()
        var inside: Set<[Substring]> = [[]]  // folders of the bundle that are no links, which could lead anywhere
        for file in manifest.files {
            let parts = file.path.split(separator: "/", omittingEmptySubsequences: false)
            let location = url.appendingPathComponent(file.path)
            let folder = parts.dropLast()
            guard !parts.contains(where: { $0.isEmpty || $0 == ".." || $0 == "." || $0.contains("\0") }),
                inside.contains(Array(folder))
                    || location.deletingLastPathComponent().resolvingSymlinksInPath().path
                        == root.appendingPathComponent(folder.joined(separator: "/")).path
            else {
                throw MeSPError("\(url.path): the manifest names a file outside the bundle, \(file.path).")
            }
            inside.insert(Array(folder))
            guard let attributes = try? FileManager.default.attributesOfItem(atPath: location.path) else {
                throw MeSPError("\(url.path) lacks \(file.path); export the bundle again.")
            }
            guard attributes[.type] as? FileAttributeType == .typeRegular, attributes[.size] as? Int == file.size else {
                throw MeSPError(
                    "\(file.path) in \(url.path) is not the \(file.size) bytes the manifest says; copy or export the bundle again."
                )
            }
            if weights.contains(file.path) { versions[file.path] = FileVersion(location) }
        }
    }

    private var blockFiles: [String] { (0..<architecture.numHiddenLayers).map(Self.blockFile) }

    func checkSums() throws {
        for file in manifest.files {
            guard try sha256(of: url.appendingPathComponent(file.path)) == file.sha256 else {
                throw MeSPError(
                    "\(file.path) in \(url.path) is damaged (its SHA-256 differs); copy or export the bundle again.")
            }
        }
    }

    mutating func checkDimensions() throws {
        let lengths = manifest.blocks.map(\.words) + [manifest.embedding.words, manifest.head.words]
        // Every block must be of one kind, and have that kind's mixer.
        let places = manifest.blocks.enumerated().flatMap { kind, blocks in
            blocks.layers.map { (block: $0, kind: kind) }
        }
        .sorted { $0.block < $1.block }
        guard architecture.isConsistent, lengths.allSatisfy({ (1...(1 << 31)).contains($0) }),
            !manifest.seqLens.isEmpty, manifest.seqLens.allSatisfy({ (1...(1 << 20)).contains($0) }),
            !manifest.ranks.isEmpty, manifest.ranks.allSatisfy({ (1...(1 << 12)).contains($0) }),
            places.map(\.block) == Array(0..<architecture.numHiddenLayers),
            manifest.blocks.allSatisfy({ Set($0.layers.map { architecture.layers[$0] }).count == 1 })
        else { throw MeSPError("\(url.path): the manifest's dimensions don't fit together; export the bundle again.") }
        kinds = places.map(\.kind)
    }

    func checkLayout() throws {
        let tables = [manifest.embedding, manifest.head].map { ($0.file, $0.words) }
        for (file, words) in tables + zip(blockFiles, kinds.map { manifest.blocks[$0].words })
        where sizes[file] != words * 4 {
            throw MeSPError("\(file) in \(url.path) doesn't have the length of its layout; export the bundle again.")
        }
        func check(
            _ arrays: [Manifest.PackedArray], _ words: Int, plain: [PlainArray],
            matrices: [(name: String, rows: Int, columns: Int)]
        ) throws {
            func array(_ name: String, dtype: String, fits: ([Int]) -> Bool) throws -> Manifest.PackedArray {
                guard let array = arrays.first(where: { $0.name == name }), array.dtype == dtype, fits(array.shape),
                    array.shape.allSatisfy({ (1...(1 << 24)).contains($0) }),
                    (0...words).contains(array.offset), array.words <= words - array.offset
                else { throw wrong(name) }
                return array
            }
            func wrong(_ name: String) -> MeSPError {
                MeSPError("\(url.path): the manifest's entry for \(name) is missing or wrong; export the bundle again.")
            }
            for expected in plain {
                let dtype = expected.isFloat32 ? "float32" : manifest.dtype
                _ = try array(expected.name, dtype: dtype) { $0 == expected.shape }
            }
            for (name, rows, columns) in matrices {
                let hasBiases = arrays.contains { $0.name == name + "biases" }
                let isTable = { (shape: [Int]) in shape.count == 2 && shape[0] == rows }
                let weight = try array(name + "weight", dtype: "uint32", fits: isTable)
                let scales = try array(name + "scales", dtype: hasBiases ? manifest.dtype : "uint8", fits: isTable)
                if hasBiases { _ = try array(name + "biases", dtype: manifest.dtype) { $0 == scales.shape } }
                let format = QuantizationFormat(
                    inputs: columns, words: weight.shape[1], groups: scales.shape[1], hasBiases: hasBiases)
                guard format != nil else { throw wrong(name + "weight") }
            }
        }
        for blocks in manifest.blocks {
            let block = architecture.block(blocks.layers[0])
            try check(
                blocks.arrays, blocks.words, plain: block.plainArrays,
                matrices: block.modules.map {
                    let (inputs, outputs) = block.dimensions($0)
                    return ($0.name + ".", outputs, inputs)
                })
        }
        let table = [("", architecture.vocabSize, architecture.hiddenSize)]
        try check(manifest.embedding.arrays, manifest.embedding.words, plain: [], matrices: table)
        let norm = PlainArray(name: "norm", shape: [architecture.hiddenSize])
        try check(manifest.head.arrays, manifest.head.words, plain: [norm], matrices: table)
    }
}
