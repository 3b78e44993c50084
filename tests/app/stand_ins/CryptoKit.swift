// The part of CryptoKit that the package uses.

import Foundation

// developer.apple.com/documentation/cryptokit/sha256, …/sha256digest
public struct SHA256: Sendable {
    public init() {}
    public mutating func update(data: some DataProtocol) {}
    public func finalize() -> SHA256Digest { SHA256Digest() }
}
public struct SHA256Digest: Sequence, Sendable {
    public func makeIterator() -> Array<UInt8>.Iterator { [].makeIterator() }
}

// developer.apple.com/documentation/cryptokit/p256/signing
public enum P256 {
    public enum Signing {
        public struct PrivateKey: Sendable {
            public init() {}
            public init(derRepresentation: some RandomAccessCollection<UInt8>) throws {}
            public var derRepresentation: Data { Data() }
            public var publicKey: PublicKey { PublicKey() }
            public func signature(for data: some DataProtocol) throws -> ECDSASignature { ECDSASignature() }
        }
        public struct PublicKey: Sendable {
            public var derRepresentation: Data { Data() }
        }
        public struct ECDSASignature: Sendable {
            public var derRepresentation: Data { Data() }
        }
    }
}
