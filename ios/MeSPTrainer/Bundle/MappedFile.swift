import Foundation
import MLX
import MeSPFiles
import MeSPSentences

/// Returns a file of 32-bit words as one flat `uint32` array `[bytes / 4]`: the existing map of the file, or else a new map. The file is not copied.
///
/// - Parameters:
///   - url: a file whose length is a multiple of `mappingUnit`.
///   - size: the length that the file must have, in bytes.
///   - modified: the modification time that the file must have; nil for any time.
///   - known: the existing map of the file, if any.
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

/// A hook for tests: whether the process has no addresses left.
package enum Addresses {
    @TaskLocal package static var areUsedUp: @Sendable () -> Bool = { false }
}

/// The unit of a mapping's length, in bytes. It is the page size of an iPhone and a multiple of every smaller page size. Metal takes only whole pages
/// without a copy.
package let mappingUnit = 16384

/// Maps part of an open file as a read-only array, without a copy. Returns nil if the system refuses (`errno`).
///
/// The pages are clean and file-backed: the system can drop and reread them, and they don't count in `phys_footprint`. The mapping ends when the last
/// array that uses it is freed.
///
/// An anonymous page precedes the data, and its last word holds the data's size. MLX's CPU allocator stores the size of each of its buffers in this
/// place. So the allocator can treat the mapping as one of its buffers.
///
/// - Parameter shape: a shape whose number of bytes is a multiple of `mappingUnit`. For any other shape the function returns nil (`EINVAL`).
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
    // The range is reserved without access, because writable pages would count against a limit on data.
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
