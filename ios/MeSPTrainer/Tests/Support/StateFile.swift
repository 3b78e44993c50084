import Foundation
import Testing

@testable import MeSPCore
@testable import MeSPFiles

struct StateFile {
    private var header: [String: Any]
    private let tensors: Data

    init(_ url: URL) throws {
        let file = try Data(contentsOf: url)
        let start = 8 + Int(file[0]) + Int(file[1]) << 8 + Int(file[2]) << 16
        header = try #require(try JSONSerialization.jsonObject(with: file[8..<start]) as? [String: Any])
        tensors = file[start...].dropLast(32)
    }

    var text: Data {
        get { Data(((header["__metadata__"] as? [String: String])?["state"] ?? "").utf8) }
        set { header["__metadata__"] = ["state": String(decoding: newValue, as: UTF8.self)] }
    }

    mutating func change(_ change: (inout [String: Any]) throws -> Void) throws {
        var state = try #require(try JSONSerialization.jsonObject(with: text) as? [String: Any])
        try change(&state)
        text = try JSONSerialization.data(withJSONObject: state)
    }

    /// - Parameter seals: whether to append the digest. Files in the first format have no digest.
    func data(seals: Bool = true) throws -> Data {
        var header = header
        if !seals { header["sha256"] = nil }
        let json = try JSONSerialization.data(withJSONObject: header)
        let content = withUnsafeBytes(of: UInt64(json.count).littleEndian) { Data($0) } + json + tensors
        return seals ? Self.sealed(content) : content
    }

    static func sealed(_ content: Data) -> Data {
        let digest = sha256(content)
        return content
            + stride(from: 0, to: digest.count, by: 2).map { UInt8(digest.dropFirst($0).prefix(2), radix: 16)! }
    }
}
