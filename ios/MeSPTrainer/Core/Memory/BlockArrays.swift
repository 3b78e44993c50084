import Foundation
import MLX
import MeSPBundle
import MeSPFiles
import MeSPSentences

/// Arrays that are kept in a file instead of in memory, and read as mappings.
///
/// The file has no name, and disappears when it is closed. An instance must not be used from several threads at once.
final class ArrayFile {
    private let file: Int32
    private var shapes = [Int: [Int]]()
    private let dtype: DType
    private let stride: Int
    private var length = 0
    private(set) var written = 0
    /// The mapped array that was read last, or with `keepsMaps` the arrays that stay mapped. The references keep MLX from reusing mapped buffers for
    /// results.
    private var maps = [Int: MLXArray]()
    private let keepsMaps: Bool

    /// - Parameters:
    ///   - folder: the folder for the file, which must not be in memory (tmpfs).
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
        let done = try array.withBytes(confirms: false) { data in
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
        func map() throws -> MLXArray? { try mapArray(file, offset: index * stride, [stride / dtype.size], dtype) }
        var mapped = try maps[index] ?? map()
        if mapped == nil {
            // The process may have address space for only one mapping at a time.
            maps = [:]
            mapped = try map()
        }
        guard let pages = mapped else {
            throw MeSPError("Cannot map the training state: \(lastError()).")
        }
        if !keepsMaps { maps = [:] }
        maps[index] = pages
        return pages[0..<shape.reduce(1, *)].reshaped(shape)
    }
}

package struct BlockArrays {
    private var arrays: [MLXArray?]
    private let file: ArrayFile?
    private var slots: [Int]
    private let keepsPrevious: Bool
    private var begun = Set<Int>()

    var written: Int { file?.written ?? 0 }

    /// - Parameters:
    ///   - place: the place of these arrays in the file, from 0, in units of `count` arrays.
    init(count: Int, file: ArrayFile?, place: Int = 0, keepsPrevious: Bool = false) {
        arrays = Array(repeating: nil, count: count)
        slots = Array(place * count..<(place + 1) * count)
        self.file = file
        self.keepsPrevious = keepsPrevious
    }

    func read(_ block: Int) throws -> MLXArray {
        if let file { return try file.read(slots[block]) }
        guard let array = arrays[block] else { preconditionFailure("block \(block) was never set") }
        return array
    }

    /// Stores an array, evaluated, in place of the block's previous array. If the evaluation fails, the previous array is kept.
    ///
    /// - Parameter array: a confirmed array, or any array in a piece of work that writes it again if the piece fails (`MLXErrors`).
    package mutating func write(_ array: MLXArray, _ block: Int) throws {
        if let file {
            let slot = keepsPrevious ? (slots[block] + arrays.count) % (2 * arrays.count) : slots[block]
            try file.write(array, at: slot)
            slots[block] = slot
        } else if arrays[block] == nil || MLXErrors.areLate {
            try array.compute(confirms: false)
            arrays[block] = array
        } else {
            // On a CPU the array is copied into the memory of the block's previous array. `array` itself lies among temporary arrays and would
            // fragment the memory.
            try array.withBytes { bytes in
                arrays[block] = nil
                arrays[block] = .of(bytes, array.shape, array.dtype)
            }
        }
    }

    /// The next array that is added for a block replaces the block's sum.
    mutating func beginSums() { begun = [] }

    func sum(with array: MLXArray, _ block: Int) throws -> MLXArray {
        try begun.contains(block) ? read(block) + array : array
    }

    mutating func writeSum(_ sum: MLXArray, _ block: Int) throws {
        try write(sum, block)
        begun.insert(block)
    }

    mutating func take(_ block: Int) throws -> MLXArray {
        defer { arrays[block] = nil }
        return try read(block)
    }
}
