import Foundation

/// Whether backups include a file, and whether it is readable while the phone is locked.
public struct StoragePolicy: Sendable, Equatable {
    /// Whether backups of the phone include the file.
    package var isInBackup: Bool
    /// Whether the file is readable only while the phone is unlocked. Otherwise it is readable from the first unlock after a restart.
    package var isUnreadableWhileLocked: Bool

    /// The policy of bundles. They can be added again, and overnight runs read them.
    package static let bundle = StoragePolicy(isInBackup: false, isUnreadableWhileLocked: false)
    /// The policy of a run's tokens, log and adapters in the app, which overnight runs access.
    package static let run = StoragePolicy(isInBackup: true, isUnreadableWhileLocked: false)
    /// The policy of saved states, of an app's runs and of the federation's files. They are useful only on this phone.
    package static let state = StoragePolicy(isInBackup: false, isUnreadableWhileLocked: false)
    /// The policy of chats and choices, which overnight runs do not read.
    package static let chat = StoragePolicy(isInBackup: true, isUnreadableWhileLocked: true)

    /// Sets a policy on a file or a folder. Outside iOS it sets at most whether backups include the file.
    @TaskLocal package static var set: @Sendable (URL, StoragePolicy) -> Void = { url, policy in
        var (url, values) = (url, URLResourceValues())
        values.isExcludedFromBackup = !policy.isInBackup
        try? url.setResourceValues(values)
        #if os(iOS)
            let type: FileProtectionType =
                policy.isUnreadableWhileLocked ? .complete : .completeUntilFirstUserAuthentication
            try? FileManager.default.setAttributes([.protectionKey: type], ofItemAtPath: url.path)
        #endif
    }

    /// Sets this policy on a file, or on a folder and the files created in it later.
    public func apply(to url: URL) { Self.set(url, self) }
}
