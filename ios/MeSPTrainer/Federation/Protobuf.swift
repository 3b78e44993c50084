import Foundation
import MeSPSentences

/// Writes a message in protobuf's wire format (https://protobuf.dev/programming-guides/encoding). Numbers that are 0 and empty texts are omitted
/// unless `isPresent` is set.
struct ProtobufWriter {
    private(set) var data = Data()

    mutating func add(_ field: Int, _ number: UInt64, isPresent: Bool = false) {
        guard number != 0 || isPresent else { return }
        key(field, .varint)
        varint(number)
    }

    mutating func add(_ field: Int, signed number: Int64, isPresent: Bool = false) {
        add(field, UInt64(bitPattern: (number << 1) ^ (number >> 63)), isPresent: isPresent)
    }

    mutating func add(_ field: Int, _ number: Double, isPresent: Bool = false) {
        guard number != 0 || isPresent else { return }
        key(field, .fixed64)
        append(number)
    }

    mutating func add(_ field: Int, packed numbers: [Double]) {
        guard !numbers.isEmpty else { return }
        key(field, .bytes)
        varint(UInt64(numbers.count * 8))
        for number in numbers { append(number) }
    }

    mutating func add(_ field: Int, _ text: String, isPresent: Bool = false) {
        if !text.isEmpty || isPresent { add(field, Data(text.utf8)) }
    }

    mutating func add(_ field: Int, _ bytes: Data) {
        key(field, .bytes)
        varint(UInt64(bytes.count))
        data.append(bytes)
    }

    mutating func add(_ field: Int, message write: (inout ProtobufWriter) -> Void) {
        var message = ProtobufWriter()
        write(&message)
        add(field, message.data)
    }

    fileprivate enum WireType: UInt64 {
        case varint = 0
        case fixed64 = 1
        case bytes = 2
        case fixed32 = 5
    }

    private mutating func key(_ field: Int, _ type: WireType) { varint(UInt64(field) << 3 | type.rawValue) }

    private mutating func varint(_ number: UInt64) {
        var rest = number
        while rest > 0x7f {
            data.append(UInt8(rest & 0x7f | 0x80))
            rest >>= 7
        }
        data.append(UInt8(rest))
    }

    private mutating func append(_ number: Double) {
        withUnsafeBytes(of: number.bitPattern.littleEndian) { data.append(contentsOf: $0) }
    }
}

struct ProtobufMessage {
    private enum Value {
        case number(UInt64)
        case bytes(Data)
    }
    private var fields = [Int: [Value]]()
    /// The maximum number of fields. A field takes far more memory than its bytes.
    private static let mostFields = 1 << 16

    init(_ data: Data) throws {
        var (rest, count) = (data[...], 0)
        while !rest.isEmpty {
            count += 1
            guard count <= Self.mostFields else { throw Self.damaged }
            let key = try Self.varint(&rest)
            let value: Value
            switch ProtobufWriter.WireType(rawValue: key & 7) {
            case .varint: value = .number(try Self.varint(&rest))
            case .fixed64: value = .number(try Self.littleEndian(8, &rest))
            case .fixed32: value = .number(try Self.littleEndian(4, &rest))
            case .bytes: value = .bytes(Data(try Self.take(try Self.varint(&rest), &rest)))
            case nil: throw Self.damaged
            }
            fields[Int(key >> 3), default: []].append(value)
        }
    }

    private static let damaged = MeSPError("The server sent something other than a protobuf message; ask its operator.")

    private static func take(_ count: UInt64, _ rest: inout Data) throws -> Data {
        guard count <= UInt64(rest.count) else { throw damaged }
        defer { rest = rest.dropFirst(Int(count)) }
        return rest.prefix(Int(count))
    }

    private static func littleEndian(_ count: UInt64, _ rest: inout Data) throws -> UInt64 {
        try take(count, &rest).reversed().reduce(0) { $0 << 8 | UInt64($1) }
    }

    private static func varint(_ rest: inout Data) throws -> UInt64 {
        var number: UInt64 = 0
        for shift in stride(from: 0, to: 64, by: 7) {
            guard let byte = rest.popFirst() else { throw damaged }
            number |= UInt64(byte & 0x7f) << UInt64(shift)
            if byte < 0x80 { return number }
        }
        throw damaged
    }

    func has(_ field: Int) -> Bool { fields[field] != nil }

    func number(_ field: Int) -> UInt64 {
        if case .number(let number) = fields[field]?.last { number } else { 0 }
    }

    func signed(_ field: Int) -> Int64 {
        let zigzag = number(field)
        return Int64(bitPattern: zigzag >> 1) ^ -Int64(bitPattern: zigzag & 1)
    }

    func double(_ field: Int) -> Double { Double(bitPattern: number(field)) }

    func bytes(_ field: Int) -> Data { all(field).last ?? Data() }

    func text(_ field: Int) -> String { String(decoding: bytes(field), as: UTF8.self) }

    func texts(_ field: Int) -> [String] { all(field).map { String(decoding: $0, as: UTF8.self) } }

    func messages(_ field: Int) throws -> [ProtobufMessage] { try all(field).map(ProtobufMessage.init) }

    private func all(_ field: Int) -> [Data] {
        (fields[field] ?? []).compactMap { if case .bytes(let bytes) = $0 { bytes } else { nil } }
    }
}
