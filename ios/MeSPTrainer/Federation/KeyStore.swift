import Foundation
import MeSPSentences

#if os(iOS)
    import Security

    /// Stores a node's private key in the Keychain, because other apps and the person's computer can read an app's documents.
    struct KeyStore {
        private let item: [String: Any] = [
            kSecClass as String: kSecClassGenericPassword, kSecAttrService as String: "Federation",
            kSecAttrAccount as String: "node.key",
        ]

        init(file: URL) {}

        /// Returns the bytes of the key; nil if there is none yet.
        func read() throws -> Data? {
            var found: CFTypeRef?
            let status = SecItemCopyMatching(
                NSDictionary(dictionary: item.merging([kSecReturnData as String: true]) { $1 }) as CFDictionary, &found)
            if status == errSecItemNotFound { return nil }
            guard status == errSecSuccess, let data = found as? Data else { throw failure(status) }
            return data
        }

        /// Stores a key unless the Keychain has one already. The key stays on this device, and can be read after the first unlock since the device
        /// was started.
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

        /// Returns the bytes of the key; nil if there is none yet.
        func read() throws -> Data? {
            FileManager.default.fileExists(atPath: file.path) ? try Data(contentsOf: file) : nil
        }

        /// Stores a key unless the file exists already.
        func add(_ key: Data) throws { try writeDurably(key, to: file, replacing: false) }
    }
#endif
