import Foundation
import MeSPSentences

#if canImport(Darwin)
    import Darwin
#endif

/// Opens a regular file and nothing else: a symbolic link could lead out of its folder, and a device or a pipe has no end.
///
/// - Parameters:
///   - flags: of `open`.
///   - mode: of a file that it creates; by default everybody may read it.
///   - followsLinks: whether a symbolic link in the place of the file is followed.
/// - Throws: `MeSPError` with the reason alone.
package func openRegularFile(_ url: URL, _ flags: Int32, mode: mode_t = 0o644, followsLinks: Bool = false) throws
    -> Int32
{
    // Without O_NONBLOCK a pipe would wait for its other end.
    let file = open(url.path, flags | (followsLinks ? 0 : O_NOFOLLOW) | O_NONBLOCK | O_CLOEXEC, mode)
    guard file >= 0 else { throw errno == ELOOP ? MeSPError("it is a symbolic link") : MeSPError("\(lastError())") }
    var status = stat()
    guard fstat(file, &status) == 0, status.st_mode & S_IFMT == S_IFREG else {
        close(file)
        throw MeSPError("it is not a regular file")
    }
    return file
}

/// The contents of a regular file, mapped, or nil where it cannot be opened. The file that was checked is the one that is read.
package func regularFile(_ url: URL, followsLinks: Bool = false) -> Data? {
    guard let file = try? openRegularFile(url, O_RDONLY, followsLinks: followsLinks) else { return nil }
    defer { close(file) }
    return mapped(file)
}

/// Makes a folder unless it is there, and refuses a symbolic link in its place, which could lead out of the folder that it is in.
package func makeFolder(_ url: URL) throws {
    var status = stat()
    if lstat(url.path, &status) == 0, status.st_mode & S_IFMT == S_IFLNK { throw MeSPError("it is a symbolic link") }
    try FileManager.default.createDirectory(at: url, withIntermediateDirectories: true)
}

/// The size of an open file in bytes, and when it was modified last, since 1970: both tell whether it has changed.
package func status(of file: Int32) -> (size: Int, modified: Duration)? {
    var status = stat()
    guard fstat(file, &status) == 0 else { return nil }
    #if canImport(Darwin)
        let modified = status.st_mtimespec
    #else
        let modified = status.st_mtim
    #endif
    return (Int(status.st_size), .seconds(modified.tv_sec) + .nanoseconds(modified.tv_nsec))
}

/// The contents of an open file, mapped, or nil where the system refuses.
package func mapped(_ file: Int32) -> Data? {
    guard let size = status(of: file)?.size else { return nil }
    guard size > 0 else { return Data() }
    guard let start = mmap(nil, size, PROT_READ, MAP_PRIVATE, file, 0), start != MAP_FAILED else { return nil }
    return Data(bytesNoCopy: start, count: size, deallocator: .unmap)
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

package func lastError() -> String { String(cString: strerror(errno)) }
