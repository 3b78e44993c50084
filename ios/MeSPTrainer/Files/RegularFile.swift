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

package func lastError() -> String { String(cString: strerror(errno)) }
