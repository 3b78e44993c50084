import Foundation
import MLX
import MeSPFiles
import MeSPSentences

/// Memory-maps a file as a flat `uint32` array `[bytes / 4]`, or returns `known` if the file is already mapped.
///
/// - Parameters:
///   - url: a file whose size is a multiple of `mappingUnit`.
package func mappedWords(_ url: URL, size: Int, modified: Duration?, known: MLXArray? = nil) throws -> MLXArray {
    let file = try explaining({ try openRegularFile(url, O_RDONLY) }, as: { "Cannot open \(url.path): \($0)." })
    defer { close(file) }
    guard let now = status(of: file), now.size == size, modified == nil || now.modified == modified else {
        throw MeSPError("\(url.path) has changed since the bundle was opened; export the bundle again.")
    }
    if let known { return known }
    guard let words = try mapArray(file, offset: 0, [size / 4], .uint32) else {
        throw MeSPError("Cannot map \(url.path): \(lastError()).")
    }
    return words
}

package enum Addresses {
    @TaskLocal package static var areUsedUp: @Sendable () -> Bool = { false }
}

/// The unit of a mapping's size, in bytes. It is the page size of an iPhone. Metal wraps only whole pages without a copy.
package let mappingUnit = 16384

/// Memory-maps part of an open file as a read-only array. Returns nil and sets `errno` if the system refuses. Tries again if MLX lacks the memory.
///
/// The system can drop the pages and read them again, and they do not count in `phys_footprint`. The mapping ends when the last array that uses it is
/// freed.
///
/// An anonymous page precedes the data. Its last word holds the data's size, because MLX's CPU allocator reads a buffer's size from there.
///
/// - Parameter shape: the array's shape. Its size in bytes must be a multiple of `mappingUnit`, or else `errno` is `EINVAL`.
package func mapArray(_ file: Int32, offset: Int, _ shape: [Int], _ dtype: DType) throws -> MLXArray? {
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
    // Inaccessible pages do not count against a limit on data, so the range is reserved without access.
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
    do {
        return try MLXErrors.repeating(confirms: false) {
            let array = MLXArray(rawPointer: data, shape, dtype: dtype) { munmap(start, page + size) }
            if array.ndim == 0 { try MLXErrors.check() }
            return array
        }
    } catch {
        // The array was not made, so it does not end the mapping.
        munmap(start, page + size)
        throw error
    }
}
