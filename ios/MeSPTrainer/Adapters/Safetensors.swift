import Foundation
import MLX
import MeSPBundle
import MeSPFiles
import MeSPSentences

#if canImport(CryptoKit)
    import CryptoKit
#endif

/// The tensors of a memory-mapped safetensors file.
///
/// The reader checks the header, so that a damaged file cannot cause large allocations. MLX's own reader trusts the header.
package struct Safetensors {
    package let metadata: [String: String]
    private let tensors: [String: Tensor]
    private let file: Data
    private let data: Data

    private struct Tensor: Decodable {
        let dtype: String
        let shape: [Int]
        let dataOffsets: [Int]

        enum CodingKeys: String, CodingKey {
            case dtype, shape
            case dataOffsets = "data_offsets"
        }
    }

    private struct Header: Decodable {
        var metadata = [String: String]()
        var tensors = [String: Tensor]()

        init(from decoder: any Decoder) throws {
            let container = try decoder.container(keyedBy: JSONValue.Key.self)
            for key in container.allKeys {
                if key.stringValue == "__metadata__" {
                    // MLX writes null if there is no metadata.
                    metadata = try container.decodeIfPresent([String: String].self, forKey: key) ?? [:]
                } else {
                    tensors[key.stringValue] = try container.decode(Tensor.self, forKey: key)
                }
            }
        }
    }

    fileprivate static let dtypes: [String: DType] = [
        "F32": .float32, "F16": .float16, "BF16": .bfloat16, "U32": .uint32, "U8": .uint8, "I32": .int32, "I64": .int64,
    ]

    /// - Throws: `MeSPError` if the file is missing, is not a regular file, or is damaged.
    package init(_ url: URL) throws {
        let name = url.lastPathComponent
        guard let file = regularFile(url, followsLinks: true) else { throw MeSPError("it has no \(name)") }
        guard let tensors = Self(file) else { throw MeSPError("\(name) is damaged") }
        self = tensors
    }

    /// Returns nil unless the header is valid and the tensors' data fill the rest of the file.
    init?(_ file: Data) {
        guard file.count >= 8 else { return nil }
        let length = file.withUnsafeBytes { UInt64(littleEndian: $0.loadUnaligned(as: UInt64.self)) }
        guard length <= UInt64(file.count - 8) else { return nil }
        let start = file.startIndex + 8 + Int(length)
        guard let header = try? JSONDecoder().decode(Header.self, from: file[(file.startIndex + 8)..<start]) else {
            return nil
        }
        (metadata, tensors, data) = (header.metadata, header.tensors, file[start...])
        self.file = file

        guard tensors.values.allSatisfy({ $0.dataOffsets.count == 2 }) else { return nil }
        var end = 0
        for tensor in tensors.values.sorted(by: { $0.dataOffsets[0] < $1.dataOffsets[0] }) {
            guard let dtype = Self.dtypes[tensor.dtype], tensor.dataOffsets[0] == end else { return nil }
            var size = dtype.size
            for dimension in tensor.shape {
                let (product, overflow) = size.multipliedReportingOverflow(by: dimension)
                guard dimension >= 1, dimension <= Int32.max, !overflow else { return nil }
                size = product
            }
            guard size <= data.count - end, tensor.dataOffsets[1] == end + size else { return nil }
            end += size
        }
        guard end == data.count else { return nil }
    }

    var names: Set<String> { Set(tensors.keys) }

    /// Whether the file ends with a seal, which is meant to be the SHA-256 of all bytes before it.
    package var isSealed: Bool { tensors[Seal.name]?.dataOffsets == [data.count - Seal.size, data.count] }

    /// Whether the seal equals the SHA-256 of all bytes before it. The check reads the whole file.
    package var isIntact: Bool {
        guard isSealed else { return false }
        var hash = SHA256()
        hash.update(data: file.dropLast(Seal.size))
        return hash.finalize().elementsEqual(file.suffix(Seal.size))
    }

    package func shape(_ name: String) -> [Int]? { tensors[name]?.shape }

    /// A copy of the named tensor, or nil if the file has no such tensor.
    package subscript(name: String) -> MLXArray? {
        guard let tensor = tensors[name], let dtype = Self.dtypes[tensor.dtype] else { return nil }
        let (start, end) = (tensor.dataOffsets[0], tensor.dataOffsets[1])
        return .of(Data(data[(data.startIndex + start)..<(data.startIndex + end)]), tensor.shape, dtype)
    }
}

private enum Seal {
    static let (name, size) = ("sha256", 32)
}

/// A tensor for a new file. `make` computes its values when the tensor is written.
package struct NewTensor {
    let name: String
    let shape: [Int]
    let dtype: DType
    let make: () throws -> MLXArray

    package init(name: String, shape: [Int], dtype: DType, make: @escaping () throws -> MLXArray) {
        (self.name, self.shape, self.dtype, self.make) = (name, shape, dtype, make)
    }
}

/// Writes a safetensors file. The file at `url` is replaced only after the new file is completely on disk.
package func writeSafetensors(
    _ tensors: [NewTensor], metadata: [String: String], seal: Bool = false, isInBackup: Bool = true, to url: URL
) throws {
    try writeWhole(url, isInBackup: isInBackup, safetensors(tensors, metadata: metadata, seal: seal))
}

/// Returns a function that writes a safetensors file with one tensor at a time in memory.
func safetensors(
    _ tensors: [NewTensor], metadata: [String: String], seal: Bool = false
) throws -> (FileHandle) throws -> Void {
    var header: [String: Any] = ["__metadata__": metadata]
    var end = 0
    func describe(_ name: String, _ shape: [Int], _ dtype: DType) {
        guard let code = Safetensors.dtypes.first(where: { $0.value == dtype })?.key else {
            preconditionFailure("no file has tensors of \(dtype)")
        }
        let start = end
        end += shape.reduce(dtype.size, *)
        header[name] = ["dtype": code, "shape": shape, "data_offsets": [start, end]] as [String: Any]
    }
    for tensor in tensors { describe(tensor.name, tensor.shape, tensor.dtype) }
    if seal { describe(Seal.name, [Seal.size], .uint8) }
    var json = try JSONSerialization.data(withJSONObject: header, options: .sortedKeys)
    // Padding makes the tensors' data start at a multiple of 8 bytes.
    json.append(Data(repeating: UInt8(ascii: " "), count: -json.count & 7))

    let start = json
    return { file in
        var hash = SHA256()
        func write(_ data: Data) throws {
            try file.write(contentsOf: data)
            if seal { hash.update(data: data) }
        }
        try write(withUnsafeBytes(of: UInt64(start.count).littleEndian) { Data($0) })
        try write(start)
        for tensor in tensors {
            let array = try tensor.make()
            try MLXErrors.check()
            precondition(array.shape == tensor.shape && array.dtype == tensor.dtype)
            try array.withBytes(write)
        }
        if seal { try file.write(contentsOf: Data(hash.finalize())) }
    }
}
