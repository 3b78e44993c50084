import Foundation
import MeSPSentences

#if canImport(Darwin)
    import Darwin
#else
    import Glibc
#endif

/// Writes a file that its owner alone can read, from the moment it is there. After a crash or a loss of power the file has all of the
/// data, or is as it was.
///
/// - Parameter replacing: whether a file that is there is replaced; otherwise it stays.
/// - Throws: `POSIXError`
func writeDurably(_ data: Data, to file: URL, replacing: Bool = true) throws {
    func check(_ result: Int32) throws {
        if result < 0 { throw POSIXError(POSIXErrorCode(rawValue: errno) ?? .EIO) }
    }
    let folder = file.deletingLastPathComponent()
    let new = folder.appendingPathComponent(".\(file.lastPathComponent).\(UUID().uuidString)").path
    let descriptor = open(new, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0o600)
    try check(descriptor)
    defer { unlink(new) }
    do {
        let handle = FileHandle(fileDescriptor: descriptor, closeOnDealloc: true)
        #if os(iOS)
            // The system can read it again once the device was unlocked after a start.
            try FileManager.default.setAttributes(
                [.protectionKey: FileProtectionType.completeUntilFirstUserAuthentication], ofItemAtPath: new)
        #endif
        try handle.write(contentsOf: data)
        try check(synchronize(descriptor))
        try handle.close()
    }
    if replacing {
        try check(rename(new, file.path))
    } else if link(new, file.path) < 0, errno != EEXIST {
        try check(-1)
    }
    try check(synchronize(folder: folder))
}

/// Writes the data of an open file to the disk.
///
/// - Returns: 0, or -1 where it cannot be written (`errno`).
package func synchronize(_ file: Int32) -> Int32 {
    #if canImport(Darwin)
        // `fsync` leaves the data in the disk's own cache. Some file systems lack this call.
        if fcntl(file, F_FULLFSYNC) == 0 { return 0 }
    #endif
    return fsync(file)
}

/// Writes the names in a folder to the disk, where the file system can: some on a network or a removable disk cannot.
///
/// - Returns: 0, or -1 where they cannot be written (`errno`).
package func synchronize(folder: URL) -> Int32 {
    let directory = open(folder.path, O_RDONLY | O_DIRECTORY | O_CLOEXEC)
    guard directory >= 0 else { return -1 }
    defer { close(directory) }
    return synchronize(directory) == 0 || errno == EINVAL || errno == ENOTSUP ? 0 : -1
}

/// The right to be the node of a folder, which one process has at a time. The system takes it back when the process ends, in whatever way.
final class NodeLock: Sendable {
    private let file: Int32

    /// - Throws: `MeSPError` where another node has it.
    init(_ folder: URL) throws {
        let path = folder.appendingPathComponent(".lock").path
        file = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0o600)
        guard file >= 0 else {
            throw MeSPError("\(path) cannot be written (\(String(cString: strerror(errno)))).")
        }
        guard flock(file, LOCK_EX | LOCK_NB) == 0 else {
            close(file)
            throw MeSPError("Another node is at work in \(folder.path); end it, or name another folder.")
        }
    }

    deinit { close(file) }
}
