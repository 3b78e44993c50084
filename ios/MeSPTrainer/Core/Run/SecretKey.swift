import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

#if canImport(CryptoKit)
    import CryptoKit
#endif

/// The secret key of a run with DP-SGD, 32 bytes. A step's sampled examples and its noise are derived from the key and the number of the step.
///
/// Anyone who has the key can subtract the noise. The key is kept in the run's folder, readable only by its owner, so that the run can be resumed.
/// The key is removed when the run has finished.
package struct SecretKey {
    private let bytes: Data
    private static let length = 32

    static func url(in folder: URL) -> URL { folder.appendingPathComponent("secret.key") }

    package init(bytes: Data = Data((0..<length).map { _ in UInt8.random(in: .min ... .max) })) { self.bytes = bytes }

    init(in folder: URL, resumes: Bool) throws {
        let url = Self.url(in: folder)
        if resumes, FileManager.default.fileExists(atPath: url.path) {
            guard let bytes = regularFile(url), bytes.count == Self.length else {
                throw MeSPError("\(url.path) is damaged; start the run again in another folder.")
            }
            self.init(bytes: bytes)
            return
        }
        self.init()
        try writing(url) { [bytes] in try writeWhole(url, mode: 0o600) { try $0.write(contentsOf: bytes) } }
    }

    static func remove(from folder: URL) throws {
        let file = url(in: folder)
        try explaining {
            if FileManager.default.fileExists(atPath: file.path) { try FileManager.default.removeItem(at: file) }
        } as: {
            "Cannot remove \(file.path): \($0)."
        }
    }

    /// Returns the examples of a step, ascending. Each of `count` examples is drawn independently with the probability `expected / count` (Poisson
    /// sampling).
    func drawn(_ expected: Int, of count: Int, step: Int) -> [Int] {
        guard expected < count else { return Array(0..<count) }
        let (limit, _) = UInt64(count).dividingFullWidth((UInt64(expected), 0))  // expected / count · 2⁶⁴
        return stride(from: 0, to: count, by: 4).flatMap { first in
            zip(first..<min(first + 4, count), numbers("draw", step, first / 4)).filter { $1 < limit }.map(\.0)
        }
    }

    func noiseSeed(step: Int, block: Int) -> UInt64 { numbers("noise", step, block)[0] }

    private func numbers(_ purpose: String, _ step: Int, _ index: Int) -> [UInt64] {
        var hash = SHA256()
        var data = bytes + Data(purpose.utf8)
        for number in [step, index] {
            withUnsafeBytes(of: UInt64(number).littleEndian) { data.append(contentsOf: $0) }
        }
        hash.update(data: data)
        let digest = Array(hash.finalize())
        return stride(from: 0, to: digest.count, by: 8).map { start in
            digest[start..<start + 8].reversed().reduce(0) { $0 << 8 | UInt64($1) }
        }
    }
}
