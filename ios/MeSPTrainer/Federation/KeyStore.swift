import Foundation
import MeSPSentences

#if os(iOS)
    import Security

    /// Stores a node's private key in the Keychain. The documents folder is not suitable, because the app shares it with the Files app.
    struct KeyStore {
        private let item: [String: Any] = [
            kSecClass as String: kSecClassGenericPassword, kSecAttrService as String: "Federation",
            kSecAttrAccount as String: "node.key",
        ]

        init(file: URL) {}

        func read() throws -> Data? {
            var found: CFTypeRef?
            let status = SecItemCopyMatching(
                NSDictionary(dictionary: item.merging([kSecReturnData as String: true]) { $1 }) as CFDictionary, &found)
            if status == errSecItemNotFound { return nil }
            guard status == errSecSuccess, let data = found as? Data else { throw failure(status) }
            return data
        }

        /// Stores a key unless one is stored already. The key never leaves this device. It is readable after the first unlock since the device
        /// started.
        func add(_ key: Data) throws {
            let new: [String: Any] = [
                kSecValueData as String: key,
                kSecAttrAccessible as String: kSecAttrAccessibleAfterFirstUnlockThisDeviceOnly,
            ]
            let status = SecItemAdd(NSDictionary(dictionary: item.merging(new) { $1 }) as CFDictionary, nil)
            guard status == errSecSuccess || status == errSecDuplicateItem else { throw failure(status) }
        }

        private func failure(_ status: OSStatus) -> MeSPError {
            MeSPError("the Keychain fails with \(Int(status))")
        }
    }
#else
    /// Stores a node's private key in a file that only its owner can read.
    struct KeyStore {
        let file: URL

        func read() throws -> Data? {
            FileManager.default.fileExists(atPath: file.path) ? try Data(contentsOf: file) : nil
        }

        func add(_ key: Data) throws { try writeDurably(key, to: file, replacing: false) }
    }
#endif
