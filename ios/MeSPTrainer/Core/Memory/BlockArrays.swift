import Foundation
import MLX
import MeSPBundle
import MeSPFiles
import MeSPSentences

/// Arrays of a limited size that are kept in a file instead of in memory. Each array is written whole and read as a mapping.
///
/// The file has no name, and disappears with the process. An instance must not be used from several threads at once.
final class ArrayFile {
    private let file: Int32
    private var shapes = [Int: [Int]]()
    private let dtype: DType
    /// The distance from one array to the next, in bytes: whole pages, as `mapArray` requires.
    private let stride: Int
    /// The file's length in bytes.
    private var length = 0
    /// The bytes written so far.
    private(set) var written = 0
    /// The mapped array that was read last, or with `keepsMaps` all mapped arrays that were read. While these references live, MLX does not reuse the
    /// mapped buffers for results.
    private var maps = [Int: MLXArray]()
    private let keepsMaps: Bool

    /// - Parameters:
    ///   - folder: the folder for the file; it must be on a disk, so that the file takes no memory.
    ///   - shape: the shape of the largest arrays.
    ///   - keepsMaps: whether arrays stay mapped. A GPU's driver may count mapped arrays as memory.
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
        // Whole pages are mapped, so the file must reach to the end of the last page.
        if done == array.nbytes, length < (index + 1) * stride, ftruncate(file, off_t((index + 1) * stride)) == 0 {
            length = (index + 1) * stride
        }
        guard done == array.nbytes, length >= (index + 1) * stride else {
            throw MeSPError("Cannot write the training state to disk: \(lastError()).")
        }
        shapes[index] = array.shape
        written += done
    }

    /// Returns the array at `index`, mapped. Results that depend on it must be evaluated before the next array is read.
    func read(_ index: Int) throws -> MLXArray {
        guard let shape = shapes[index] else { preconditionFailure("array \(index) was never written") }
        func map() -> MLXArray? { mapArray(file, offset: index * stride, [stride / dtype.size], dtype) }
        var mapped = maps[index] ?? map()
        if mapped == nil {
            // As with a bundle's files, the process may have addresses for only one mapping at a time.
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
/// A copy of this value keeps the arrays that are in memory. With `keepsPrevious`, the copy also keeps the arrays that are in a file, as long as each
/// of these arrays is replaced at most once.
package struct BlockArrays {
    private var arrays: [MLXArray?]
    private let file: ArrayFile?
    /// The place of each array in the file.
    private var slots: [Int]
    private let keepsPrevious: Bool
    /// The blocks whose sum has begun since `beginSums`.
    private var begun = Set<Int>()

    /// The bytes written to the file so far.
    var written: Int { file?.written ?? 0 }

    /// - Parameters:
    ///   - file: the file for the arrays; nil to keep them in memory.
    ///   - place: the place of these arrays in the file, from 0. Other lists of `count` arrays may have the other places.
    init(count: Int, file: ArrayFile?, place: Int = 0, keepsPrevious: Bool = false) {
        arrays = Array(repeating: nil, count: count)
        slots = Array(place * count..<(place + 1) * count)
        self.file = file
        self.keepsPrevious = keepsPrevious
    }

    /// Returns the array of a block, which must have been written before.
    func read(_ block: Int) throws -> MLXArray {
        if let file { return try file.read(slots[block]) }
        guard let array = arrays[block] else { preconditionFailure("block \(block) was never set") }
        return array
    }

    /// Keeps an array in place of the block's previous array. The array is evaluated and confirmed first (`MLXErrors`). If that fails, the previous
    /// array is kept.
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
            // The array is copied into the gap that the block's previous array leaves. `array` lies among a step's temporaries, where it would divide
            // the memory for the next steps' large arrays.
            try array.withBytes { bytes in
                arrays[block] = nil
                arrays[block] = MLXArray(bytes, array.shape, dtype: array.dtype)
            }
        }
    }

    /// Begins new sums: the next array that is added for a block replaces the block's sum.
    mutating func beginSums() { begun = [] }

    /// Adds an array to the sum of a block. If that fails, the sum does not change.
    mutating func add(_ array: MLXArray, _ block: Int) throws {
        try write(begun.contains(block) ? read(block) + array : array, block)
        begun.insert(block)
    }

    /// Returns a block's array, and no longer keeps it in memory. In a file, the array stays until it is overwritten.
    mutating func take(_ block: Int) throws -> MLXArray {
        defer { arrays[block] = nil }
        return try read(block)
    }
}
