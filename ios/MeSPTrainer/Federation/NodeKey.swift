import Foundation
import MeSPSentences

#if canImport(CryptoKit)
    import CryptoKit
#endif

/// The identity of a node: a key pair on P-256, which signs each call to a SuperLink.
package struct NodeKey: Sendable {
    private let key: P256Key

    /// Reads the node's key, or creates it if there is none. The key is in the Keychain on iOS, and elsewhere in a file that only its owner can read.
    ///
    /// - Throws: `MeSPError` if the key cannot be read or stored, or is not a key.
    package init(file: URL) throws {
        do {
            let store = KeyStore(file: file)
            if try store.read() == nil { try store.add(try P256Key().representation) }
            // Another process may have added a key first.
            key = try P256Key(representation: try store.read() ?? Data())
        } catch {
            throw MeSPError("\(file.path) cannot be used as this node's key (\(error.localizedDescription)).")
        }
    }

    /// The public key in PEM, as nodes register it.
    package var publicKey: String {
        let base64 = key.publicKey.base64EncodedString(options: [.lineLength64Characters, .endLineWithLineFeed])
        return "-----BEGIN PUBLIC KEY-----\n\(base64)\n-----END PUBLIC KEY-----\n"
    }

    /// The public key in OpenSSH's format, which `flwr supernode register` reads from a file.
    package var openSSH: String {
        let parts = [Data("ecdsa-sha2-nistp256".utf8), Data("nistp256".utf8), key.publicKey.suffix(65)]
        let blob = parts.reduce(into: Data()) { blob, part in
            withUnsafeBytes(of: UInt32(part.count).bigEndian) { blob.append(contentsOf: $0) }
            blob.append(part)
        }
        return "ecdsa-sha2-nistp256 \(blob.base64EncodedString())\n"
    }

    /// Returns the ECDSA signature of a text with SHA-256, in DER.
    func signature(of text: String) throws -> Data { try key.signature(of: Data(text.utf8)) }
}

#if canImport(CryptoKit)
    private struct P256Key {
        private let key: P256.Signing.PrivateKey

        init() throws { key = P256.Signing.PrivateKey() }
        init(representation: Data) throws { key = try P256.Signing.PrivateKey(derRepresentation: representation) }

        var representation: Data { key.derRepresentation }
        /// The public key as a SubjectPublicKeyInfo, in DER. It ends with the 65 bytes of the point.
        var publicKey: Data { key.publicKey.derRepresentation }
        func signature(of message: Data) throws -> Data { try key.signature(for: message).derRepresentation }
    }
#endif
