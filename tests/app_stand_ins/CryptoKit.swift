// What the core uses of CryptoKit.

import Foundation

public struct SHA256: Sendable {
    public init() {}
    public mutating func update(data: some DataProtocol) {}
    public func finalize() -> SHA256Digest { SHA256Digest() }
}
public struct SHA256Digest: Sequence, Sendable {
    public func makeIterator() -> Array<UInt8>.Iterator { [].makeIterator() }
}
