import Foundation

/// The backup and the file protection of a file that the app writes.
public struct StoragePolicy: Sendable, Equatable {
    /// Whether backups of the phone include the file.
    package var isInBackup: Bool
    /// Whether the file can be read only while the phone is unlocked. Other files can be read after the first unlock since the phone was turned on,
    /// because an overnight run reads and writes while the phone is locked.
    package var isUnreadableWhileLocked: Bool

    /// The policy of a bundle. A bundle has gigabytes that can be downloaded again, and an overnight run reads it.
    static let bundle = StoragePolicy(isInBackup: false, isUnreadableWhileLocked: false)
    /// The policy of a run's tokens, log and adapters, which an overnight run reads and writes.
    static let run = StoragePolicy(isInBackup: true, isUnreadableWhileLocked: false)
    /// The policy of the state from which a run is resumed. The file has the size of the adapters and the optimizer's state together, and is useful
    /// only with this phone's log.
    static let state = StoragePolicy(isInBackup: false, isUnreadableWhileLocked: false)
    /// The policy of chats and choices. An overnight run does not read them.
    static let chat = StoragePolicy(isInBackup: true, isUnreadableWhileLocked: true)

    /// Sets this policy on a file, or on a folder and the files that are later created in it. The policy has an effect only on Apple's systems.
    public func apply(to url: URL) {
        var (url, values) = (url, URLResourceValues())
        values.isExcludedFromBackup = !isInBackup
        try? url.setResourceValues(values)
        #if os(iOS)
            let type: FileProtectionType = isUnreadableWhileLocked ? .complete : .completeUntilFirstUserAuthentication
            try? FileManager.default.setAttributes([.protectionKey: type], ofItemAtPath: url.path)
        #endif
    }
}
