import Foundation

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
    let directory = open(folder.path, O_RDONLY | O_CLOEXEC)
    try check(directory)
    defer { close(directory) }
    try check(synchronize(directory))
}

/// Brings what was written to an open file, or the names in a folder, to the disk; negative where it can't, as of `fsync`.
private func synchronize(_ file: Int32) -> Int32 {
    #if canImport(Darwin)
        // `fsync` leaves it in the disk's own cache. Not every file system has the call that doesn't.
        if fcntl(file, F_FULLFSYNC) == 0 { return 0 }
    #endif
    return fsync(file)
}

/// The right to be the node of a folder, which one process has at a time. The system takes it back when the process ends, in whatever way.
final class NodeLock: Sendable {
    private let file: Int32

    /// - Throws: `FederationError` where another node has it.
    init(_ folder: URL) throws {
        let path = folder.appendingPathComponent(".lock").path
        file = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0o600)
        guard file >= 0 else {
            throw FederationError("\(path) cannot be written (\(String(cString: strerror(errno)))).")
        }
        guard flock(file, LOCK_EX | LOCK_NB) == 0 else {
            close(file)
            throw FederationError("Another node is at work in \(folder.path); end it, or name another folder.")
        }
    }

    deinit { close(file) }
}
