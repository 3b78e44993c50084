import Foundation
import MeSPSentences

#if canImport(Darwin)
    import Darwin
#endif

/// Flushes the data of an open file to the disk.
///
/// - Returns: 0; or -1 with `errno` set.
package func synchronize(_ file: Int32) -> Int32 {
    #if canImport(Darwin)
        // `fsync` can leave data in the disk's cache, but some file systems do not support F_FULLFSYNC.
        if fcntl(file, F_FULLFSYNC) == 0 { return 0 }
    #endif
    return fsync(file)
}

/// Flushes the entries of a folder to the disk.
///
/// - Returns: 0, also if the file system does not support this; or -1 with `errno` set.
package func synchronize(folder: URL) -> Int32 {
    let directory = open(folder.path, O_RDONLY | O_DIRECTORY | O_CLOEXEC)
    guard directory >= 0 else { return -1 }
    defer { close(directory) }
    return synchronize(directory) == 0 || errno == EINVAL || errno == ENOTSUP ? 0 : -1
}

/// Writes a file atomically. The new file replaces the file at `url` when the new file is completely on the disk.
package func writeWhole(
    _ url: URL, mode: mode_t = 0o644, isInBackup: Bool = true, _ write: @escaping (FileHandle) throws -> Void
) throws {
    try writeWhole([(url, write)], mode: mode, isInBackup: isInBackup)
}

/// Writes files. They replace existing files when all new files are completely on the disk.
package func writeWhole(
    _ files: [(url: URL, write: (FileHandle) throws -> Void)], mode: mode_t = 0o644, isInBackup: Bool = true
) throws {
    func partial(_ url: URL) -> URL { url.appendingPathExtension("partial") }
    defer { for (url, _) in files { try? FileManager.default.removeItem(at: partial(url)) } }
    for (url, write) in files {
        let file = FileHandle(
            fileDescriptor: try openNewFile(partial(url), mode: mode), closeOnDealloc: true)
        if !isInBackup { StoragePolicy.state.apply(to: partial(url)) }
        try write(file)
        guard synchronize(file.fileDescriptor) == 0 else { throw MeSPError("\(lastError())") }
        try file.close()
    }
    for (url, _) in files { try replace(url, with: partial(url)) }
}

/// Renames `new` to `url`, and flushes the name to the disk. The contents of `new` must be on the disk already.
package func replace(_ url: URL, with new: URL) throws {
    guard rename(new.path, url.path) == 0 else { throw MeSPError("\(lastError())") }
    guard synchronize(folder: url.deletingLastPathComponent()) == 0 else { throw MeSPError("\(lastError())") }
}

/// Calls `body`, which writes the file at `url`. Turns its errors into `MeSPError`s that name the file.
package func writing<R>(_ url: URL, _ body: () throws -> R) throws -> R {
    do {
        return try body()
    } catch {
        throw MeSPError("Cannot write \(url.path): \(error.plainSentence).")
    }
}
