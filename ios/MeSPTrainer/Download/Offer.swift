import Foundation
import MeSPBundle
import MeSPFiles
import MeSPImport
import MeSPSentences

extension HubDownload {
    /// A bundle or a model on the Hub, before it is downloaded. It can be saved, so that a later process can resume the download.
    public struct Offer: Sendable, Codable {
        package struct File: Codable, Sendable {
            package let path: String
            package let size: Int
            package let sha256: String?

            /// Whether the path stays inside a folder, the size is at most 1 TiB, and a known SHA-256 has 64 hexadecimal digits.
            var isPossible: Bool {
                leadsDown(path) && (0...(1 << 40)).contains(size)
                    && sha256.map { $0.count == 64 && Offer.isHexadecimal($0) } ?? true
            }
        }

        package struct Model: Codable, Sendable {
            package let commit: String
            let config: Data
            let card: Data?
            let files: [File]
        }

        package let repository: String
        /// The manifest of the bundle. For a model, the manifest of the bundle that the device makes.
        public let manifest: Manifest
        let commit: String?
        package let model: Model?
        /// The bytes of the bundle's manifest file; nil for a model.
        let json: Data?
        let files: [File]

        /// Whether the offer is a model in MLX's format. A model is converted after the download.
        package var isModel: Bool { model != nil }
        public var size: Int { files.reduce(json?.count ?? 0) { $0 + $1.size } }
        /// The size of the bundle on the device, in bytes. For a model, the size is an estimate.
        public var bundleSize: Int {
            guard isModel else { return size }
            return files.filter { !$0.path.hasSuffix(".safetensors") }.reduce(manifest.mappedBytes) { $0 + $1.size }
        }

        /// The address of the licence; nil if it is unknown or not an https address.
        public var licenseLink: URL? {
            Self.link(manifest.model.licenseLink, in: "https://huggingface.co/\(repository)/blob/\(commit ?? "main")/")
        }

        /// Returns the address of a link; nil if `link` is nil, empty, or an address without https.
        ///
        /// - Parameters:
        ///   - link: an address, or the path of a file in the repository.
        ///   - files: the address of the repository's files.
        static func link(_ link: String?, in files: String) -> URL? {
            guard let link, !link.isEmpty else { return nil }
            guard let scheme = URL(string: link)?.scheme else {
                return URL(string: files)?.appendingPathComponent(link)
            }
            return scheme == "https" ? URL(string: link) : nil
        }

        init(repository: String, json: Data, commit: String?) throws {
            (self.repository, self.json, self.commit, model) = (repository, json, commit, nil)
            manifest = try Manifest.read(json, of: repository)
            files = manifest.files.map { File(path: $0.path, size: $0.size, sha256: $0.sha256) }
        }

        init(repository: String, model: Model) throws {
            (self.repository, json, commit, self.model, files) = (repository, nil, model.commit, model, model.files)
            try Self.check(files, commit: model.commit, of: repository)
            manifest = try ModelImport.manifest(
                config: model.config, card: model.card, of: repository, revision: model.commit)
        }

        /// Checks the commit's name, the paths, the sizes and the digests.
        ///
        /// - Throws: `MeSPError` if one of them is invalid, or if a path occurs twice.
        static func check(_ files: [File], commit: String, of repository: String) throws {
            guard isCommit(commit), files.allSatisfy(\.isPossible), Set(files.map(\.path)).count == files.count else {
                throw MeSPError("The file list of \(repository) cannot be a model's; take another repository.")
            }
        }

        static func isCommit(_ text: String) -> Bool { (7...64).contains(text.count) && isHexadecimal(text) }

        fileprivate static func isHexadecimal(_ text: String) -> Bool {
            text.allSatisfy { $0.isASCII && $0.isHexDigit }
        }

        private enum CodingKeys: CodingKey { case repository, json, commit, model }

        public init(from decoder: any Decoder) throws {
            let container = try decoder.container(keyedBy: CodingKeys.self)
            let repository = try container.decode(String.self, forKey: .repository)
            if let model = try container.decodeIfPresent(Model.self, forKey: .model) {
                try self.init(repository: repository, model: model)
            } else {
                try self.init(
                    repository: repository, json: container.decode(Data.self, forKey: .json),
                    commit: container.decodeIfPresent(String.self, forKey: .commit))
            }
        }
    }
}
