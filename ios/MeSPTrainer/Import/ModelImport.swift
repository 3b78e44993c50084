import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

/// A model in MLX's format, checked, and how it becomes a bundle.
///
/// A stand-in of the interface: it gives every model the plain fixture's bundle.
package struct ModelImport: Sendable {
    package let manifest: Manifest
    package let notices: [Sentence] = []

    package var size: Int { manifest.files.reduce(0) { $0 + $1.size } }

    package init(
        model: URL, id: String? = nil, revision: String? = nil, device: Backend? = nil, dtype: ElementType? = nil
    ) throws {
        guard let config = regularFile(model.appendingPathComponent("config.json")) else {
            throw MeSPError("\(model.lastPathComponent) has no config.json.")
        }
        manifest = try Self.manifest(
            config: config, card: nil, of: id ?? model.lastPathComponent, revision: revision, device: device)
    }

    package func write(to bundle: URL, progress: (_ bytes: Int) throws -> Void = { _ in }) throws {
        let files = FileManager.default
        guard !files.fileExists(atPath: bundle.path) else {
            throw MeSPError("There is a bundle \(bundle.lastPathComponent) already; delete it first.")
        }
        let partial = bundle.deletingLastPathComponent().appendingPathComponent(
            ".importing-\(bundle.lastPathComponent)")
        try files.createDirectory(at: partial, withIntermediateDirectories: true)
        var bytes = 0
        for file in manifest.files.map({ ($0.path, $0.size) }) + [("manifest.json", 0)] {
            let target = partial.appendingPathComponent(file.0)
            try files.createDirectory(at: target.deletingLastPathComponent(), withIntermediateDirectories: true)
            if !files.fileExists(atPath: target.path) {
                let data = try Data(contentsOf: Self.fixture.appendingPathComponent(file.0))
                try writeWhole(target) { try $0.write(contentsOf: data) }
            }
            bytes += file.1
            try progress(bytes)
        }
        try replace(bundle, with: partial)
    }

    package static func manifest(
        config: Data, card: Data?, of name: String, revision: String?, device: Backend? = nil
    ) throws -> Manifest {
        guard case .object(let fields) = try? JSONValue(json: config), fields["model_type"]?.string == "qwen2" else {
            throw MeSPError("\(name): the config.json names no family that is known; export it with mesp-export.")
        }
        return try Manifest.read(Data(contentsOf: fixture.appendingPathComponent("manifest.json")), of: name)
    }

    package static func neededFiles(_ names: [String]) -> [String] {
        let others = ["config.json", "tokenizer.json", "tokenizer_config.json", "README.md"]
        return names.filter { others.contains($0) || $0.hasPrefix("model") && $0.hasSuffix(".safetensors") }
    }

    private static var fixture: URL {
        let folder = ProcessInfo.processInfo.environment["MESP_FIXTURES"] ?? ""
        return URL(fileURLWithPath: folder).appendingPathComponent("tied-32/bundle.mesp").resolvingSymlinksInPath()
    }
}

extension Manifest.Model {
    package var licenseName: String? { nil }
    package var licenseLink: String? { nil }
}
