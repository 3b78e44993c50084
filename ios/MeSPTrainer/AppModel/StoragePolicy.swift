import Foundation

/// The protection and the backup of a file that the app writes.
public struct StoragePolicy: Sendable, Equatable {
    /// Whether a backup of the phone has it.
    public var isInBackup: Bool
    /// Whether it can be read only while the phone is not locked. All else can be read from the first unlock after the phone was turned
    /// on: a run at night reads and writes while it is locked.
    public var isUnreadableWhileLocked: Bool

    /// Gigabytes that can be had again; read by a run in the night.
    static let bundle = StoragePolicy(isInBackup: false, isUnreadableWhileLocked: false)
    /// A run's tokens, log and adapters, which are read and written in the night.
    static let run = StoragePolicy(isInBackup: true, isUnreadableWhileLocked: false)
    /// The state from which a run is resumed: as large as the adapters and the optimizer's state, and of use with this phone's log only.
    static let state = StoragePolicy(isInBackup: false, isUnreadableWhileLocked: false)
    /// Chats, and preferences in them. Nothing in the night reads them.
    static let chat = StoragePolicy(isInBackup: true, isUnreadableWhileLocked: true)

    /// Keeps a file or a folder so, and what is made in the folder later. Elsewhere than on Apple's systems it does nothing.
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
