import Foundation
import MeSPFiles
import MeSPSentences

/// A folder of tokenized text, which a run uses in place of its bundle's data. Its `data.json` lists the splits and their files.
package enum TokenFolder {
    static func entries(in folder: URL) throws -> [String: Manifest.Tokens] {
        guard let json = regularFile(folder.appendingPathComponent("data.json")), json.count <= Manifest.largestSize,
            let entries = try? JSONDecoder().decode([String: Manifest.Tokens].self, from: json),
            entries.values.allSatisfy({ $0.parts.allSatisfy { isPath($0.file, within: folder) } })
        else { throw MeSPError("\(folder.path) holds no tokens to train on; tokenize the text again.") }
        return entries
    }

    /// Writes the folder completely, or throws. Replaces an existing folder.
    package static func write(_ splits: [String: TokenStream], to folder: URL) throws {
        let partial = folder.deletingLastPathComponent().appendingPathComponent(".partial-\(UUID().uuidString)")
        defer { try? FileManager.default.removeItem(at: partial) }
        do {
            try makeNewFolder(partial)
            var entries = [String: Manifest.Tokens]()
            for (name, split) in splits {
                let (file, examples) = ("\(name).bin", "\(name).examples.bin")
                let (mask, labels) = ("\(name).mask.bin", "\(name).labels.bin")
                let (images, places) = ("\(name).images.bin", "\(name).places.bin")
                let files: [(String, Data?)] = [
                    (file, split.tokens), (examples, split.examples), (mask, split.mask), (labels, split.labels),
                    (images, split.images?.rows), (places, split.images?.places),
                ]
                for (file, data) in files { try data?.write(to: partial.appendingPathComponent(file)) }
                entries[name] = .init(
                    file: file, tokens: split.tokenCount,
                    examples: split.examples.map { .init(file: examples, count: $0.count / 8) },
                    mask: split.mask.map { _ in mask }, labels: split.labels.map { _ in labels },
                    begin: split.begin, pack: nil,
                    images: split.images.map {
                        .init(file: images, count: $0.count, dtype: $0.dtype, places: places)
                    })
            }
            try JSONEncoder().encode(entries).write(to: partial.appendingPathComponent("data.json"))
            try? FileManager.default.removeItem(at: folder)
            try FileManager.default.moveItem(at: partial, to: folder)
        } catch {
            throw MeSPError("Cannot write the tokens to \(folder.path): \(error.plainSentence).")
        }
    }
}
