import Foundation
import MeSPBundle
import MeSPFiles
import MeSPImport
import MeSPSentences

extension HubDownload {
    /// A bundle or a model on the Hub, before it is downloaded. It can be stored, so that another process can resume the download.
    public struct Offer: Sendable, Codable {
        /// A file that is to be downloaded.
        package struct File: Codable, Sendable {
            package let path: String
            package let size: Int
            /// nil where it is not known.
            package let sha256: String?

            /// Whether such a file can be one of a repository.
            var isPossible: Bool {
                leadsDown(path) && (0...(1 << 40)).contains(size)
                    && sha256.map { $0.count == 64 && Offer.isHexadecimal($0) } ?? true
            }
        }

        /// A model in MLX's format, which becomes a bundle on the device.
        package struct Model: Codable, Sendable {
            package let commit: String
            let config: Data
            /// The README.md; nil where there is none.
            let card: Data?
            /// The device to rewrite it for; nil: the default of `ModelImport`.
            package let device: Backend?
            let files: [File]
        }

        /// As `owner/name`.
        package let repository: String
        /// The bundle's manifest, of a model the one that it will have.
        public let manifest: Manifest
        /// The commit of the files; nil if the server names none.
        let commit: String?
        /// nil of a bundle.
        package let model: Model?
        /// The bytes of a bundle's manifest, unchanged; nil of a model.
        let json: Data?
        /// The files to download, besides the manifest.
        let files: [File]

        /// Whether it is a model, which is rewritten after the download.
        package var isModel: Bool { model != nil }
        /// The size of the download, in bytes.
        public var size: Int { files.reduce(json?.count ?? 0) { $0 + $1.size } }
        /// The size of the bundle on the device, in bytes; of a model it is a little more than the bundle will have.
        public var bundleSize: Int {
            guard isModel else { return size }
            return files.filter { !$0.path.hasSuffix(".safetensors") }.reduce(manifest.mappedBytes) { $0 + $1.size }
        }

        /// Where the licence can be read; nil where it is not known.
        public var licenseLink: URL? {
            Self.link(manifest.model.licenseLink, in: "https://huggingface.co/\(repository)/blob/\(commit ?? "main")/")
        }

        /// - Parameters:
        ///   - link: an address, or a file of the repository.
        ///   - files: the address of the repository's files.
        static func link(_ link: String?, in files: String) -> URL? {
            guard let link, !link.isEmpty else { return nil }
            guard let scheme = URL(string: link)?.scheme else {
                return URL(string: files)?.appendingPathComponent(link)
            }
            return scheme == "https" ? URL(string: link) : nil
        }

        /// Checks that this build can use such a bundle.
        init(repository: String, json: Data, commit: String?) throws {
            (self.repository, self.json, self.commit, model) = (repository, json, commit, nil)
            manifest = try Manifest.read(json, of: repository)
            files = manifest.files.map { File(path: $0.path, size: $0.size, sha256: $0.sha256) }
        }

        /// Checks that this build can rewrite such a model.
        init(repository: String, model: Model) throws {
            (self.repository, json, commit, self.model, files) = (repository, nil, model.commit, model, model.files)
            try Self.check(files, commit: model.commit, of: repository)
            manifest = try ModelImport.manifest(
                config: model.config, card: model.card, of: repository, revision: model.commit, device: model.device)
        }

        /// Throws unless a commit of a repository can have these files.
        static func check(_ files: [File], commit: String, of repository: String) throws {
            guard isCommit(commit), files.allSatisfy(\.isPossible), Set(files.map(\.path)).count == files.count else {
                throw MeSPError("The file list of \(repository) cannot be a model's; take another repository.")
            }
        }

        static func isCommit(_ text: String) -> Bool { (7...64).contains(text.count) && isHexadecimal(text) }

        fileprivate static func isHexadecimal(_ text: String) -> Bool {
            text.allSatisfy { $0.isASCII && $0.isHexDigit }
        }

        private enum Key: String, CodingKey { case repository, json, commit, model }

        public init(from decoder: any Decoder) throws {
            let container = try decoder.container(keyedBy: Key.self)
            let repository = try container.decode(String.self, forKey: .repository)
            if let model = try container.decodeIfPresent(Model.self, forKey: .model) {
                try self.init(repository: repository, model: model)
            } else {
                try self.init(
                    repository: repository, json: container.decode(Data.self, forKey: .json),
                    commit: container.decodeIfPresent(String.self, forKey: .commit))
            }
        }

        public func encode(to encoder: any Encoder) throws {
            var container = encoder.container(keyedBy: Key.self)
            try container.encode(repository, forKey: .repository)
            try container.encodeIfPresent(model, forKey: .model)
            try container.encodeIfPresent(json, forKey: .json)
            try container.encodeIfPresent(commit, forKey: .commit)
        }
    }
}
