import Foundation
import MeSPSentences

#if canImport(Darwin)
    import Darwin
#endif

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

/// Backups of the device.
package enum Backups {
    /// Leaves a file out of them, also under a later name. Elsewhere than on Apple's systems it does nothing.
    @TaskLocal package static var leaveOut: @Sendable (URL) -> Void = { url in
        var (url, values) = (url, URLResourceValues())
        values.isExcludedFromBackup = true
        try? url.setResourceValues(values)
    }
}

/// Writes a file that replaces the one at `url` when all of it is on the disk, and not before.
///
/// - Parameter isInBackup: whether backups of the device may have it, and what a process that is ended leaves of it.
package func writeWhole(
    _ url: URL, mode: mode_t = 0o644, isInBackup: Bool = true, _ write: @escaping (FileHandle) throws -> Void
) throws {
    try writeWhole([(url, write)], mode: mode, isInBackup: isInBackup)
}

/// Writes files that replace those there when all of them are wholly on the disk, and not before.
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

/// Renames a file or a folder, whose contents are on the disk, and brings its new name there too.
package func replace(_ url: URL, with new: URL) throws {
    guard rename(new.path, url.path) == 0 else { throw MeSPError("\(lastError())") }
    guard synchronize(folder: url.deletingLastPathComponent()) == 0 else { throw MeSPError("\(lastError())") }
}

/// Calls `body`, which writes a file. Its error becomes a sentence about that file.
package func writing<R>(_ url: URL, _ body: () throws -> R) throws -> R {
    do {
        return try body()
    } catch {
        throw MeSPError("Cannot write \(url.path): \(error.plainSentence).")
    }
}
