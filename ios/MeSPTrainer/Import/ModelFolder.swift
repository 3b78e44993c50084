import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

extension ModelImport {
    /// Returns the path of a file in a model's folder.
    ///
    /// - Throws: `MeSPError` if the file is a symbolic link that leads out of the folder. In the Hugging Face Hub's cache, a snapshot's files are links
    ///   to files outside of the snapshot, so a link may lead into the repository's folder.
    static func place(of name: String, in folder: URL) throws -> URL {
        let (url, real) = (folder.appendingPathComponent(name), folder.resolvingSymlinksInPath())
        let parent = real.deletingLastPathComponent()
        let root = parent.lastPathComponent == "snapshots" ? parent.deletingLastPathComponent() : real
        guard url.resolvingSymlinksInPath().path.hasPrefix(root.path + "/") else {
            throw MeSPError("\(url.path) is a link that leads out of its folder; put the file there.")
        }
        return url
    }

    static func copied(_ names: [String], from folder: URL) throws -> [String] {
        let copied = names.filter { PlainFamilies.tokenizerFiles.contains($0) || Manifest.isTerms($0) }
        guard copied.count <= Bounds.copiedFiles else {
            throw MeSPError(
                "\(folder.path) has more than \(Bounds.copiedFiles) files of a tokenizer and of licences; remove those that the model does not need."
            )
        }
        return copied
    }

    /// Returns the contents of a file to copy. Configurations lose the keys that name Python code.
    static func contents(_ name: String, in folder: URL) throws -> Data {
        let url = try place(of: name, in: folder)
        guard let data = regularFile(url, followsLinks: true) else {
            throw MeSPError("\(url.path) is not a regular file; put one in its place.")
        }
        let most = Manifest.isTerms(name) ? Bounds.termsBytes : Bounds.copiedBytes
        guard data.count <= most else {
            throw MeSPError("\(url.path) has more than \(most >> 20) MiB; take a smaller one.")
        }
        guard ["tokenizer_config.json", "generation_config.json"].contains(name) else { return data }
        guard let value = try? readObject(url) else {
            throw MeSPError("\(url.path) cannot be read as a JSON object.")
        }
        let clean = withoutCode(.object(value))
        return clean == .object(value) ? data : Data(clean.json.utf8)
    }
}

/// Throws unless the factors of a manifest's architecture are within the bounds, before they are rounded to `Float`.
func checkNumbers(_ architecture: JSONValue) throws {
    let fields = architecture.object ?? [:]
    let mixers = (fields["mixers"]?.array ?? []).compactMap(\.object)
    let keys = ["rms_norm_eps", "embedding_scale", "logits_scaling", "final_logit_softcapping"]
    let factors =
        keys.map { fields[$0] }
        + mixers.flatMap { mixer in
            ["attention_scale", "rope_scale", "attn_logit_softcapping"].map { mixer[$0] }
                + (mixer["frequencies"]?.array ?? []).filter(\.isTruthy)
        }
    let numbers = factors.compactMap { $0 }.filter { $0 != .null }
    guard numbers.allSatisfy({ $0.double.map(Bounds.numbers.contains) ?? false }) else { throw unusable("numbers") }
}
