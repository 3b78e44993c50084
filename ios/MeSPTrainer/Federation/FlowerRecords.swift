import Foundation
import MeSPSentences

package struct FlowerRecords: Sendable, Equatable {
    package var arrays = [String: [String: FlowerArray]]()
    package var metrics = [String: [String: FlowerValue]]()
    package var configs = [String: [String: FlowerValue]]()

    package init(
        arrays: [String: [String: FlowerArray]] = [:], metrics: [String: [String: FlowerValue]] = [:],
        configs: [String: [String: FlowerValue]] = [:]
    ) {
        (self.arrays, self.metrics, self.configs) = (arrays, metrics, configs)
    }
}

package enum FlowerValue: Sendable, Equatable {
    case double(Double)
    case int(Int64)
    case unsigned(UInt64)
    case flag(Bool)
    case text(String)
    case bytes(Data)
    case texts([String])

    init?(_ message: ProtobufMessage) throws {
        switch [1, 2, 3, 4, 5, 6, 25].first(where: message.has) {
        case 1: self = .double(message.double(1))
        case 2: self = .int(message.signed(2))
        case 3: self = .unsigned(message.number(3))
        case 4: self = .flag(message.number(4) != 0)
        case 5: self = .text(message.text(5))
        case 6: self = .bytes(message.bytes(6))
        case 25: self = .texts(try message.messages(25).last?.texts(1) ?? [])
        default: return nil
        }
    }

    func write(to message: inout ProtobufWriter) {
        switch self {
        case .double(let number): message.add(1, number, isPresent: true)
        case .int(let number): message.add(2, signed: number, isPresent: true)
        case .unsigned(let number): message.add(3, number, isPresent: true)
        case .flag(let flag): message.add(4, UInt64(flag ? 1 : 0), isPresent: true)
        case .text(let text): message.add(5, text, isPresent: true)
        case .bytes(let bytes): message.add(6, bytes)
        case .texts(let texts): message.add(25) { list in for text in texts { list.add(1, text, isPresent: true) } }
        }
    }
}

/// An array of numbers as in NumPy's `.npy` files, row-major and little-endian.
package struct FlowerArray: Sendable, Equatable {
    package enum Kind: String, Sendable {
        case float32 = "<f4"
        /// The bits of bfloat16. NumPy has no bfloat16.
        case uint16 = "<u2"

        var name: String { self == .float32 ? "float32" : "uint16" }
        var size: Int { self == .float32 ? 4 : 2 }
    }
    package let kind: Kind
    package let shape: [Int]
    package let data: Data

    /// - Precondition: `data` has the size that `kind` and `shape` require.
    package init(_ kind: Kind, shape: [Int], data: Data) {
        precondition(data.count == shape.reduce(kind.size, *))
        (self.kind, self.shape, self.data) = (kind, shape, data)
    }

    /// The array as a `.npy` file of version 1.0 (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html).
    var npy: Data {
        let sizes = shape.map(String.init).joined(separator: ", ") + (shape.count == 1 ? "," : "")
        let header = "{'descr': '\(kind.rawValue)', 'fortran_order': False, 'shape': (\(sizes)), }"
        let padding = 64 - (10 + header.utf8.count + 1) % 64
        let padded = header + String(repeating: " ", count: padding % 64) + "\n"
        var file = Self.magic + Data([1, 0, UInt8(padded.utf8.count & 0xff), UInt8(padded.utf8.count >> 8)])
        file.append(contentsOf: padded.utf8)
        file.append(data)
        return file
    }

    private static let magic = Data([0x93]) + Data("NUMPY".utf8)

    /// Reads a `.npy` file.
    ///
    /// - Throws: `MeSPError` if the element type is not in `Kind`, the array is in Fortran order, or the file is invalid.
    init(npy file: Data) throws {
        let file = Data(file)
        guard file.count >= 12, file.prefix(6) == Self.magic else {
            throw MeSPError("The server sent an array that is not a .npy file; ask its operator.")
        }
        let start = file[6] == 1 ? 10 : 12
        let length = (8..<start).reversed().reduce(0) { $0 << 8 | Int(file[$1]) }
        let header = String(decoding: file.dropFirst(start).prefix(length), as: UTF8.self)
        func value(_ key: String, until end: Character) -> Substring? {
            header.range(of: "'\(key)': ").flatMap { header[$0.upperBound...].split(separator: end).first }
        }
        guard let kind = (value("descr", until: ",")?.dropFirst().dropLast()).flatMap({ Kind(rawValue: String($0)) }),
            value("fortran_order", until: ",") == "False", let sizes = value("shape", until: ")")
        else { throw MeSPError("The server sent an array that is neither float32 nor uint16; ask its operator.") }
        let shape = sizes.dropFirst().split(separator: ",").map { Int($0.trimmingCharacters(in: .whitespaces)) }
        let data = Data(file.dropFirst(start + length))
        var bytes = kind.size
        for size in shape {
            let (product, overflow) = bytes.multipliedReportingOverflow(by: size ?? -1)
            guard let size, size >= 0, !overflow else { throw MeSPError("The server sent an array without a shape.") }
            bytes = product
        }
        guard bytes == data.count else { throw MeSPError("The server sent an array that is incomplete.") }
        self.init(kind, shape: shape.compactMap { $0 }, data: data)
    }
}
