import Foundation
import MLX

#if canImport(Darwin)
    import Darwin
#else
    import Glibc
#endif

/// Maps a file of 32-bit words into memory as one flat `uint32` array `[bytes / 4]`, without copying it.
///
/// The pages are clean and file-backed: the system can drop and reread them, and they don't count in
/// `phys_footprint`. The mapping goes when the last array that uses it does.
///
/// An anonymous page lies in front of the file, whose last word holds the file's size: MLX's CPU allocator keeps
/// the size of a buffer there, so that it can take the mapping for one of its own.
///
/// - Parameters:
///   - url: a file whose length is a multiple of 16 KiB, as Metal wants it.
///   - size: the length it must have, in bytes.
func mappedWords(_ url: URL, size: Int) throws -> MLXArray {
    let page = Int(getpagesize())
    let file = open(url.path, O_RDONLY)
    guard file >= 0 else { throw MeSPError("Cannot open \(url.path): \(lastError()).") }
    defer { close(file) }
    var status = stat()
    guard fstat(file, &status) == 0, Int(status.st_size) == size else {
        throw MeSPError("\(url.path) has changed since the bundle was opened; export the bundle again.")
    }

    let flags = MAP_PRIVATE | MAP_ANON
    guard let start = mmap(nil, page + size, PROT_READ | PROT_WRITE, flags, -1, 0), start != MAP_FAILED else {
        throw MeSPError("Cannot map \(url.path): \(lastError()).")
    }
    let data = start + page
    guard mmap(data, size, PROT_READ, MAP_PRIVATE | MAP_FIXED, file, 0) == data else {
        let reason = lastError()
        munmap(start, page + size)
        throw MeSPError("Cannot map \(url.path): \(reason).")
    }
    (data - MemoryLayout<Int>.size).storeBytes(of: size, as: Int.self)
    return MLXArray(rawPointer: data, [size / 4], dtype: .uint32) { munmap(start, page + size) }
}

private func lastError() -> String { String(cString: strerror(errno)) }
