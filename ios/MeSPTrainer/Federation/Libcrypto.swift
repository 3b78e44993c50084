import MeSPSentences

#if !canImport(CryptoKit)
    import Foundation
    import MeSPFiles
    import MeSPSentences

    /// The functions of OpenSSL's libcrypto that replace CryptoKit on Linux. The library is loaded at the first use.
    private enum Libcrypto {
        typealias Key = OpaquePointer
        typealias Output = UnsafeMutablePointer<UnsafeMutablePointer<UInt8>?>

        nonisolated(unsafe) private static let library =
            dlopen("libcrypto.so.3", RTLD_NOW) ?? dlopen("libcrypto.so.1.1", RTLD_NOW)

        static func function<F>(_ name: String, _ type: F.Type) throws -> F {
            guard let library, let function = dlsym(library, name) else {
                throw MeSPError("OpenSSL's libcrypto is missing: on Debian, apt install libssl3.")
            }
            return unsafeBitCast(function, to: type)
        }

        /// Returns a key in DER.
        ///
        /// - Parameter name: one of OpenSSL's `i2d` functions.
        static func der(_ name: String, of key: Key) throws -> Data {
            let write = try function(name, (@convention(c) (Key, Output?) -> CInt).self)
            var bytes = [UInt8](repeating: 0, count: Int(max(write(key, nil), 0)))
            let written = bytes.withUnsafeMutableBufferPointer { buffer in
                var position = buffer.baseAddress
                return write(key, &position)
            }
            guard written > 0 else { throw MeSPError("The key could not be written.") }
            return Data(bytes)
        }
    }

    struct P256Key: Sendable {
        /// The private key as `ECPrivateKey` (RFC 5915), in DER.
        let representation: Data
        /// The public key as `SubjectPublicKeyInfo`, in DER. The last 65 bytes are the uncompressed point.
        let publicKey: Data

        init() throws {
            let new = try Libcrypto.function("EC_KEY_new_by_curve_name", (@convention(c) (CInt) -> OpaquePointer?).self)
            let generate = try Libcrypto.function("EC_KEY_generate_key", (@convention(c) (OpaquePointer) -> CInt).self)
            let prime256v1: CInt = 415
            guard let key = new(prime256v1), generate(key) == 1 else { throw MeSPError("No key could be made.") }
            try self.init(key)
        }

        init(representation: Data) throws { try self.init(Self.read(representation)) }

        private init(_ key: OpaquePointer) throws {
            defer { try? Self.free(key) }
            representation = try Libcrypto.der("i2d_ECPrivateKey", of: key)
            publicKey = try Libcrypto.der("i2d_EC_PUBKEY", of: key)
        }

        /// Returns the ECDSA signature of the message's SHA-256, in DER.
        func signature(of message: Data) throws -> Data {
            typealias Sign =
                @convention(c) (
                    CInt, UnsafePointer<UInt8>, CInt, UnsafeMutablePointer<UInt8>, UnsafeMutablePointer<CUnsignedInt>,
                    OpaquePointer
                ) -> CInt
            let sign = try Libcrypto.function("ECDSA_sign", Sign.self)
            let key = try Self.read(representation)
            defer { try? Self.free(key) }
            var signature = [UInt8](repeating: 0, count: 80)  // at most 72 are used on P-256
            var count: CUnsignedInt = 0
            var hash = SHA256()
            hash.update(data: message)
            let digest = hash.finalize()
            guard sign(0, digest, CInt(digest.count), &signature, &count, key) == 1 else {
                throw MeSPError("The key could not sign.")
            }
            return Data(signature.prefix(Int(count)))
        }

        private static func read(_ representation: Data) throws -> OpaquePointer {
            typealias Read =
                @convention(c) (
                    UnsafeMutableRawPointer?, UnsafeMutablePointer<UnsafePointer<UInt8>?>, CLong
                ) -> OpaquePointer?
            let read = try Libcrypto.function("d2i_ECPrivateKey", Read.self)
            let bytes = [UInt8](representation)
            let key = bytes.withUnsafeBufferPointer { buffer in
                var position = buffer.baseAddress
                return read(nil, &position, buffer.count)
            }
            guard let key else { throw MeSPError("it holds no private key in DER") }
            return key
        }

        private static func free(_ key: OpaquePointer) throws {
            try Libcrypto.function("EC_KEY_free", (@convention(c) (OpaquePointer) -> Void).self)(key)
        }
    }
#endif
