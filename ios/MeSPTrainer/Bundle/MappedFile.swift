import Foundation
import MLX
import MeSPFiles
import MeSPSentences

/// Maps a file of 32-bit words into memory as one flat `uint32` array `[bytes / 4]`, without copying it, unless it is mapped already.
///
/// - Parameters:
///   - url: a file whose length is a multiple of `mappingUnit`.
///   - size: the length it must have, in bytes.
///   - modified: when the file must have been modified last; nil for any time.
///   - known: the file's map, where there is one.
package func mappedWords(_ url: URL, size: Int, modified: Duration?, known: MLXArray? = nil) throws -> MLXArray {
    let file: Int32
    do {
        file = try openRegularFile(url, O_RDONLY)
    } catch {
        throw MeSPError("Cannot open \(url.path): \(error.plainSentence).")
    }
    defer { close(file) }
    guard let now = status(of: file), now.size == size, modified == nil || now.modified == modified else {
        throw MeSPError("\(url.path) has changed since the bundle was opened; export the bundle again.")
    }
    if let known { return known }
    guard let words = mapArray(file, offset: 0, [size / 4], .uint32) else {
        throw MeSPError("Cannot map \(url.path): \(lastError()).")
    }
    return words
}

/// The addresses of the process. Tests let them run out.
package enum Addresses {
    @TaskLocal package static var areUsedUp: @Sendable () -> Bool = { false }
}

/// The unit of a mapping's length, in bytes: the page of an iPhone, and of every system with smaller ones. Metal takes
/// only whole pages without copying them.
package let mappingUnit = 16384

/// Maps part of an open file as an array, read-only and without a copy, or nil where the system refuses (`errno`).
///
/// The pages are clean and file-backed: the system can drop and reread them, and they don't count in `phys_footprint`. The mapping
/// goes when the last array that uses it does.
///
/// An anonymous page lies in front, whose last word holds the data's size: MLX's CPU allocator keeps the size of a buffer there,
/// so that it can take the mapping for one of its own.
///
/// - Parameter shape: of a multiple of `mappingUnit`; other lengths are refused.
package func mapArray(_ file: Int32, offset: Int, _ shape: [Int], _ dtype: DType) -> MLXArray? {
    let page = Int(getpagesize())
    let size = shape.reduce(dtype.size, *)
    guard size % mappingUnit == 0 else {
        errno = EINVAL
        return nil
    }
    guard !Addresses.areUsedUp() else {
        errno = ENOMEM
        return nil
    }
    let (none, anonymous) = (Int32(-1), MAP_PRIVATE | MAP_ANON)
    // Reserved without access: all of it writable would count against a limit on data.
    guard let start = mmap(nil, page + size, PROT_NONE, anonymous, none, 0), start != MAP_FAILED else { return nil }
    let data = start + page
    guard mprotect(start, page, PROT_READ | PROT_WRITE) == 0,
        mmap(data, size, PROT_READ, MAP_SHARED | MAP_FIXED, file, off_t(offset)) == data
    else {
        let error = errno
        munmap(start, page + size)
        errno = error
        return nil
    }
    (data - MemoryLayout<Int>.size).storeBytes(of: size, as: Int.self)
    return MLXArray(rawPointer: data, shape, dtype: dtype) { munmap(start, page + size) }
}
