import Foundation

/// Whether backups include a file, and whether it is readable while the phone is locked.
public struct StoragePolicy: Sendable, Equatable {
    /// Whether backups of the phone include the file.
    package var isInBackup: Bool
    /// Whether the file is readable only while the phone is unlocked. Otherwise it is readable from the first unlock after a restart.
    package var isUnreadableWhileLocked: Bool

    /// The policy of bundles. They can be added again, and overnight runs read them.
    static let bundle = StoragePolicy(isInBackup: false, isUnreadableWhileLocked: false)
    /// The policy of a run's tokens, log and adapters, which overnight runs access.
    static let run = StoragePolicy(isInBackup: true, isUnreadableWhileLocked: false)
    /// The policy of saved states and of the federation's files. They are useful only on this phone.
    static let state = StoragePolicy(isInBackup: false, isUnreadableWhileLocked: false)
    /// The policy of chats and choices, which overnight runs do not read.
    static let chat = StoragePolicy(isInBackup: true, isUnreadableWhileLocked: true)

    /// Sets this policy on a file, or on a folder and the files created in it later. Outside iOS it sets at most whether backups include the file.
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
