import Foundation

/// Whether backups have a file that the app writes, and when the file can be read.
public struct StoragePolicy: Sendable, Equatable {
    /// Whether a backup of the phone has it.
    package var isInBackup: Bool
    /// Whether it can be read only while the phone is not locked. Other files can be read from the first unlock after the phone was turned
    /// on: a run in the night reads and writes while the phone is locked.
    package var isUnreadableWhileLocked: Bool

    /// A bundle: gigabytes that can be downloaded again, and that a run in the night reads.
    static let bundle = StoragePolicy(isInBackup: false, isUnreadableWhileLocked: false)
    /// A run's tokens, log and adapters, which are read and written in the night.
    static let run = StoragePolicy(isInBackup: true, isUnreadableWhileLocked: false)
    /// The state from which a run is resumed: as large as the adapters and the optimizer's state, and of use with this phone's log only.
    static let state = StoragePolicy(isInBackup: false, isUnreadableWhileLocked: false)
    /// Chats, and choices between their answers. A run in the night does not read them.
    static let chat = StoragePolicy(isInBackup: true, isUnreadableWhileLocked: true)

    /// Gives a file this policy, or a folder and the files that are made in it later. Does nothing on other systems than Apple's.
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
