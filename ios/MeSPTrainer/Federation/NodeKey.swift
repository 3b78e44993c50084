import Foundation
import MeSPSentences

#if canImport(CryptoKit)
    import CryptoKit
#endif

/// The identity of a node: a key pair on P-256. It signs each call to a SuperLink.
package struct NodeKey: Sendable {
    private let key: P256Key

    /// Reads the node's key, or creates it if there is none. The key is stored in the Keychain on iOS, and in `file` on other systems.
    ///
    /// - Throws: `MeSPError` if the key cannot be read or stored, or is invalid.
    package init(file: URL) throws {
        do {
            let store = KeyStore(file: file)
            if try store.read() == nil { try store.add(try P256Key().representation) }
            // The key is read again, because another process may have stored a key first.
            key = try P256Key(representation: try store.read() ?? Data())
        } catch {
            throw MeSPError("\(file.path) cannot be used as this node's key (\(error.localizedDescription)).")
        }
    }

    /// The public key in PEM.
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

    func signature(of text: String) throws -> Data { try key.signature(of: Data(text.utf8)) }
}

#if canImport(CryptoKit)
    private struct P256Key {
        private let key: P256.Signing.PrivateKey

        init() throws { key = P256.Signing.PrivateKey() }
        init(representation: Data) throws { key = try P256.Signing.PrivateKey(derRepresentation: representation) }

        var representation: Data { key.derRepresentation }
        var publicKey: Data { key.publicKey.derRepresentation }
        func signature(of message: Data) throws -> Data { try key.signature(for: message).derRepresentation }
    }
#endif
