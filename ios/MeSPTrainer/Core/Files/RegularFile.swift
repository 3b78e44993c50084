import Foundation
import MeSPFederation

#if canImport(Darwin)
    import Darwin
#else
    import Glibc
#endif

/// Opens a regular file and nothing else: a symbolic link could lead out of its folder, and a device or a pipe has no end.
///
/// - Parameters:
///   - flags: of `open`.
///   - mode: of a file that it creates; by default everybody may read it.
/// - Throws: `MeSPError` with the reason alone.
func openRegularFile(_ url: URL, _ flags: Int32, mode: mode_t = 0o644) throws -> Int32 {
    // Without O_NONBLOCK a pipe would wait for its other end.
    let file = open(url.path, flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, mode)
    guard file >= 0 else { throw errno == ELOOP ? MeSPError("it is a symbolic link") : MeSPError("\(lastError())") }
    var status = stat()
    guard fstat(file, &status) == 0, status.st_mode & S_IFMT == S_IFREG else {
        close(file)
        throw MeSPError("it is not a regular file")
    }
    return file
}

/// The contents of a regular file, mapped, or nil: a device or a pipe in its place would never end.
func regularFile(_ url: URL) -> Data? {
    var status = stat()
    guard stat(url.path, &status) == 0, status.st_mode & S_IFMT == S_IFREG else { return nil }
    return try? Data(contentsOf: url, options: .mappedIfSafe)
}

/// The contents of a regular file that is no symbolic link, mapped, or nil.
func unlinkedFile(_ url: URL) -> Data? {
    guard let file = try? openRegularFile(url, O_RDONLY) else { return nil }
    close(file)
    return try? Data(contentsOf: url, options: .mappedIfSafe)
}

/// Writes a file that replaces the one at `url` when all of it is on the disk, and not before.
package func writeWhole(_ url: URL, mode: mode_t = 0o644, _ write: (FileHandle) throws -> Void) throws {
    let partial = url.appendingPathExtension("partial")
    defer { try? FileManager.default.removeItem(at: partial) }
    let file = FileHandle(
        fileDescriptor: try openRegularFile(partial, O_WRONLY | O_CREAT | O_TRUNC, mode: mode),
        closeOnDealloc: true)
    try write(file)
    guard synchronize(file.fileDescriptor) == 0 else { throw MeSPError("\(lastError())") }
    try file.close()
    try replace(url, with: partial)
}

/// Renames a file or a folder, whose contents are on the disk, and brings its new name there too.
func replace(_ url: URL, with new: URL) throws {
    guard rename(new.path, url.path) == 0 else { throw MeSPError("\(lastError())") }
    guard synchronize(folder: url.deletingLastPathComponent()) == 0 else { throw MeSPError("\(lastError())") }
}

func lastError() -> String { String(cString: strerror(errno)) }
