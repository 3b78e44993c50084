import Foundation
import MeSPFederation

#if canImport(CryptoKit)
    import CryptoKit
#endif

/// The SHA-256 of a file's contents in lower-case hexadecimal, read in pieces of 1 MiB.
package func sha256(of url: URL) throws -> String {
    guard let opened = try? openRegularFile(url, O_RDONLY) else { throw MeSPError("Cannot read \(url.path).") }
    let file = FileHandle(fileDescriptor: opened, closeOnDealloc: true)
    var hash = SHA256()
    while let piece = try file.read(upToCount: 1 << 20), !piece.isEmpty {
        hash.update(data: piece)
    }
    return hexadecimal(hash.finalize())
}
