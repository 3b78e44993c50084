import Foundation
import MeSPSentences

#if canImport(Darwin)
    import Darwin
#endif

/// Flushes the data of an open file to the disk.
///
/// - Returns: 0, or -1 if the data cannot be written (`errno`).
package func synchronize(_ file: Int32) -> Int32 {
    #if canImport(Darwin)
        // `fsync` leaves the data in the disk's cache. Some file systems do not support F_FULLFSYNC.
        if fcntl(file, F_FULLFSYNC) == 0 { return 0 }
    #endif
    return fsync(file)
}

/// Flushes the names in a folder to the disk, if the file system supports this. Some file systems of network or removable disks do not.
///
/// - Returns: 0, or -1 if the names cannot be written (`errno`).
package func synchronize(folder: URL) -> Int32 {
    let directory = open(folder.path, O_RDONLY | O_DIRECTORY | O_CLOEXEC)
    guard directory >= 0 else { return -1 }
    defer { close(directory) }
    return synchronize(directory) == 0 || errno == EINVAL || errno == ENOTSUP ? 0 : -1
}

/// Backups of the device.
package enum Backups {
    /// Excludes a file from backups, even after it is renamed. This has an effect only on Apple's systems.
    @TaskLocal package static var leaveOut: @Sendable (URL) -> Void = { url in
        var (url, values) = (url, URLResourceValues())
        values.isExcludedFromBackup = true
        try? url.setResourceValues(values)
    }
}

/// Writes a file. The new file replaces the file at `url` only when the new file is completely on the disk.
///
/// - Parameter isInBackup: whether backups of the device may include the file, and the partial file that a terminated process leaves.
package func writeWhole(
    _ url: URL, mode: mode_t = 0o644, isInBackup: Bool = true, _ write: @escaping (FileHandle) throws -> Void
) throws {
    try writeWhole([(url, write)], mode: mode, isInBackup: isInBackup)
}

/// Writes files. The new files replace existing files only when all new files are completely on the disk.
package func writeWhole(
    _ files: [(url: URL, write: (FileHandle) throws -> Void)], mode: mode_t = 0o644, isInBackup: Bool = true
) throws {
    func partial(_ url: URL) -> URL { url.appendingPathExtension("partial") }
    defer { for (url, _) in files { try? FileManager.default.removeItem(at: partial(url)) } }
    for (url, write) in files {
        let file = FileHandle(
            fileDescriptor: try openRegularFile(partial(url), O_WRONLY | O_CREAT | O_TRUNC, mode: mode),
            closeOnDealloc: true)
        if !isInBackup { Backups.leaveOut(partial(url)) }
        try write(file)
        guard synchronize(file.fileDescriptor) == 0 else { throw MeSPError("\(lastError())") }
        try file.close()
    }
    for (url, _) in files { try replace(url, with: partial(url)) }
}

/// Renames a file or a folder whose contents are on the disk, and flushes its new name to the disk.
package func replace(_ url: URL, with new: URL) throws {
    guard rename(new.path, url.path) == 0 else { throw MeSPError("\(lastError())") }
    guard synchronize(folder: url.deletingLastPathComponent()) == 0 else { throw MeSPError("\(lastError())") }
}

/// Calls `body`, which writes a file. If `body` throws an error, throws a sentence about the file with the error's reason.
package func writing<R>(_ url: URL, _ body: () throws -> R) throws -> R {
    do {
        return try body()
    } catch {
        throw MeSPError("Cannot write \(url.path): \(error.plainSentence).")
    }
}
