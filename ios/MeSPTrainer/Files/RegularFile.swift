import Foundation
import MeSPSentences

#if canImport(Darwin)
    import Darwin
#endif

/// Opens a regular file. Refuses devices and pipes, which have no end. By default refuses symbolic links.
///
/// - Throws: `MeSPError` with the reason, without the file's path.
package func openRegularFile(_ url: URL, _ flags: Int32, mode: mode_t = 0o644, followsLinks: Bool = false) throws
    -> Int32
{
    // Without O_NONBLOCK, opening a pipe would wait for its other end.
    let file = open(url.path, flags | (followsLinks ? 0 : O_NOFOLLOW) | O_NONBLOCK | O_CLOEXEC, mode)
    guard file >= 0 else { throw errno == ELOOP ? MeSPError("it is a symbolic link") : MeSPError("\(lastError())") }
    var status = stat()
    guard fstat(file, &status) == 0, status.st_mode & S_IFMT == S_IFREG else {
        close(file)
        throw MeSPError("it is not a regular file")
    }
    return file
}

package func regularFile(_ url: URL, followsLinks: Bool = false) -> Data? {
    guard let file = try? openRegularFile(url, O_RDONLY, followsLinks: followsLinks) else { return nil }
    defer { close(file) }
    return mapped(file)
}

/// Returns the contents of a regular file of at most `longest` bytes; nil if it cannot be opened or is longer.
package func shortFile(_ url: URL, longest: Int, followsLinks: Bool = false) -> Data? {
    guard let opened = try? openRegularFile(url, O_RDONLY, followsLinks: followsLinks) else { return nil }
    let data = try? FileHandle(fileDescriptor: opened, closeOnDealloc: true).read(upToCount: longest + 1) ?? Data()
    return data.flatMap { $0.count <= longest ? $0 : nil }
}

/// Creates a file for writing, after removing a file or a link at `url`.
package func openNewFile(_ url: URL, mode: mode_t = 0o644) throws -> Int32 {
    unlink(url.path)
    return try openRegularFile(url, O_WRONLY | O_CREAT | O_EXCL, mode: mode)
}

/// Creates a folder if necessary. Refuses a symbolic link at `url`.
package func makeFolder(_ url: URL) throws {
    try FileManager.default.createDirectory(at: url.deletingLastPathComponent(), withIntermediateDirectories: true)
    guard mkdir(url.path, 0o777) == 0 || errno == EEXIST else { throw MeSPError("\(lastError())") }
    var status = stat()
    guard lstat(url.path, &status) == 0 else { throw MeSPError("\(lastError())") }
    guard status.st_mode & S_IFMT != S_IFLNK else { throw MeSPError("it is a symbolic link") }
    guard status.st_mode & S_IFMT == S_IFDIR else { throw MeSPError("it is not a folder") }
}

package func makeNewFolder(_ url: URL) throws {
    try FileManager.default.createDirectory(at: url.deletingLastPathComponent(), withIntermediateDirectories: true)
    guard mkdir(url.path, 0o777) == 0 else { throw MeSPError("\(lastError())") }
}

/// Returns the size of an open file in bytes, and its modification time as the duration since 1970; nil if the system reports an error.
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

package func mapped(_ file: Int32) -> Data? {
    guard let size = status(of: file)?.size else { return nil }
    guard size > 0 else { return Data() }
    guard let start = mmap(nil, size, PROT_READ, MAP_PRIVATE, file, 0), start != MAP_FAILED else { return nil }
    return Data(bytesNoCopy: start, count: size, deallocator: .unmap)
}

package func lastError() -> Sentence { systemError(errno) }
