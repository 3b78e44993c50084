import Foundation
import MLX
import MeSPBundle
import MeSPFiles
import MeSPSentences

/// Arrays up to a size, kept in a file instead of in memory: written whole, read back as a mapping.
///
/// The file has no name, and goes with the process. Not for use from several threads at once.
final class ArrayFile {
    private let file: Int32
    /// The shapes of the arrays that were written.
    private var shapes = [Int: [Int]]()
    private let dtype: DType
    /// From one array to the next, in bytes: whole pages, as `mapArray` wants them.
    private let stride: Int
    /// The file's length in bytes.
    private var length = 0
    /// Bytes written since the start.
    private(set) var written = 0
    /// The array that was read last, or with `keepsMaps` each that was read. While these references live, MLX can't donate the mapped
    /// buffers and write a result into them.
    private var maps = [Int: MLXArray]()
    private let keepsMaps: Bool

    /// - Parameters:
    ///   - folder: where the file is made; it must be on a disk for the file not to take memory.
    ///   - shape: of the largest arrays.
    ///   - keepsMaps: whether arrays stay mapped. A GPU's driver may count them.
    init(in folder: URL, shape: [Int], dtype: DType, keepsMaps: Bool) throws {
        self.keepsMaps = keepsMaps
        let path = folder.appendingPathComponent("arrays.\(UUID().uuidString)").path
        file = open(path, O_RDWR | O_CREAT | O_EXCL, 0o600)
        guard file >= 0 else { throw MeSPError("Cannot make a file in \(folder.path): \(lastError()).") }
        unlink(path)
        self.dtype = dtype
        stride = (shape.reduce(1, *) * dtype.size + mappingUnit - 1) / mappingUnit * mappingUnit
    }

    deinit { close(file) }

    func write(_ array: MLXArray, at index: Int) throws {
        let done = try array.withBytes { data in
            data.withUnsafeBytes { bytes in
                var done = 0
                while done < bytes.count {
                    let count = pwrite(
                        file, bytes.baseAddress.map { $0 + done }, bytes.count - done, off_t(index * stride + done))
                    if count <= 0 { break }
                    done += count
                }
                return done
            }
        }
        // Whole pages are mapped, and there must be some under the last.
        if done == array.nbytes, length < (index + 1) * stride, ftruncate(file, off_t((index + 1) * stride)) == 0 {
            length = (index + 1) * stride
        }
        guard done == array.nbytes, length >= (index + 1) * stride else {
            throw MeSPError("Cannot write the training state to disk: \(lastError()).")
        }
        shapes[index] = array.shape
        written += done
    }

    /// The array at `index`, mapped. Results that depend on it must be evaluated before the next array is read.
    func read(_ index: Int) throws -> MLXArray {
        guard let shape = shapes[index] else { preconditionFailure("array \(index) was never written") }
        func map() -> MLXArray? { mapArray(file, offset: index * stride, [stride / dtype.size], dtype) }
        var mapped = maps[index] ?? map()
        if mapped == nil {
            // As for a bundle's files, there may be addresses for one after the other.
            maps = [:]
            mapped = map()
        }
        guard let pages = mapped else {
            throw MeSPError("Cannot map the training state: \(lastError()).")
        }
        if !keepsMaps { maps = [:] }
        maps[index] = pages
        return pages[0..<shape.reduce(1, *)].reshaped(shape)
    }
}

/// Arrays, one for each block, in memory or in a file.
///
/// A copy of this value keeps the arrays that it has in memory. With `keepsPrevious` it also keeps those in the file while each is
/// written once more at most.
package struct BlockArrays {
    private var arrays: [MLXArray?]
    private let file: ArrayFile?
    /// The place of each array in the file.
    private var slots: [Int]
    private let keepsPrevious: Bool
    /// The blocks whose sum has begun since `beginSums`.
    private var begun = Set<Int>()

    /// Bytes written to the file since the start.
    var written: Int { file?.written ?? 0 }

    /// - Parameters:
    ///   - file: where the arrays are kept; nil for memory.
    ///   - place: of these arrays among others of as many blocks in the same file.
    init(count: Int, file: ArrayFile?, place: Int = 0, keepsPrevious: Bool = false) {
        arrays = Array(repeating: nil, count: count)
        slots = Array(place * count..<(place + 1) * count)
        self.file = file
        self.keepsPrevious = keepsPrevious
    }

    /// The array of a block that was set before.
    func read(_ block: Int) throws -> MLXArray {
        if let file { return try file.read(slots[block]) }
        guard let array = arrays[block] else { preconditionFailure("block \(block) was never set") }
        return array
    }

    /// Keeps an array, which is evaluated and confirmed first: where that fails, the array before stays.
    package mutating func write(_ array: MLXArray, _ block: Int) throws {
        if let file {
            let slot = keepsPrevious ? (slots[block] + arrays.count) % (2 * arrays.count) : slots[block]
            try file.write(array, at: slot)
            slots[block] = slot
        } else {
            guard arrays[block] != nil else {
                try array.compute()
                arrays[block] = array
                return
            }
            // Into the gap that the last one leaves. Where `array` was made, among what comes and goes in a step, it would be in the way of
            // the next steps' large arrays.
            try array.withBytes { bytes in
                arrays[block] = nil
                arrays[block] = MLXArray(bytes, array.shape, dtype: array.dtype)
            }
        }
    }

    /// The sums begin with the next arrays.
    mutating func beginSums() { begun = [] }

    /// Adds to the sum of a block; where that fails, the sum stays.
    mutating func add(_ array: MLXArray, _ block: Int) throws {
        try write(begun.contains(block) ? read(block) + array : array, block)
        begun.insert(block)
    }

    /// Hands a block's array over, and keeps it no longer.
    mutating func take(_ block: Int) throws -> MLXArray {
        defer { arrays[block] = nil }
        return try read(block)
    }
}
