import Foundation
import MeSPFiles
import MeSPSentences

extension ModelBundle {
    /// Throws unless every file of the manifest exists with the stated size and without symbolic links in its path.
    ///
    /// - Returns: the modification time of each weight file.
    func checkFiles() throws -> [String: Duration] {
        let weights = Set(manifest.weightFiles.map(\.file))
        var modified = [String: Duration]()
        for file in manifest.files {
            guard isPath(file.path, within: url) else {
                throw MeSPError("\(url.path): the manifest names a file outside the bundle, \(file.path).")
            }
            let location = url.appendingPathComponent(file.path)
            guard FileManager.default.fileExists(atPath: location.path) else {
                throw MeSPError("\(url.path) lacks \(file.path); export the bundle again.")
            }
            let opened = try explaining {
                try openRegularFile(location, O_RDONLY)
            } as: {
                "\(file.path) in \(url.path) cannot be read (\($0)); copy or export the bundle again."
            }
            defer { close(opened) }
            guard let status = status(of: opened), status.size == file.size else {
                throw MeSPError(
                    "\(file.path) in \(url.path) is not the \(file.size) bytes the manifest says; copy or export the bundle again."
                )
            }
            if weights.contains(file.path) { modified[file.path] = status.modified }
        }
        return modified
    }

    func checkSums(of files: [Manifest.File]) throws {
        for file in files {
            guard try sha256(of: url.appendingPathComponent(file.path)) == file.sha256 else {
                throw MeSPError(
                    "\(file.path) in \(url.path) is damaged (its SHA-256 differs); copy or export the bundle again.")
            }
        }
    }

    /// Throws unless the functions in `file` pass `checkFunctions(_:onGPU:)`, and their inputs and outputs fit the blocks of a kind. There must be
    /// one function for each rank.
    func checkFunctions(
        _ file: String, kind: Int, _ files: KeyPath<Manifest.Blocks, [String: String]>, length: Int
    ) throws {
        let (blocks, isPlain) = (manifest.blocks[kind], files == \.plainFunctions)
        try explaining {
            guard let data = regularFile(url.appendingPathComponent(file)) else { throw MeSPError("it cannot be read") }
            let signatures = try manifest.ranks.map {
                try FunctionSignature(
                    of: architecture.block(blocks.layers[0]),
                    dtype: isPlain || dtype == .float32 ? .float32 : .bfloat16, words: blocks.words, length: length,
                    rank: $0, packed: files == \.packed)
            }
            guard try MeSPBundle.checkFunctions(data, onGPU: device == .gpu && !isPlain) == signatures else {
                throw FunctionSignature.isAnother
            }
        } as: {
            "\(file) in \(url.path) is not a function that mesp-export writes (\($0)); export the bundle again."
        }
    }
}
