import Foundation

extension JSONValue {
    /// Reads JSON. Numbers without a fraction or an exponent become integers if they fit an `Int`.
    ///
    /// - Throws: an error if the JSON is not valid, repeats a key in an object, has half a surrogate pair or a number that `Double` cannot hold, or has more
    /// than `Bounds.jsonLevels` levels.
    package init(json: some Sequence<UInt8>) throws {
        var reader = Reader(bytes: Array(json))
        self = try reader.value(level: 0)
        reader.passSpace()
        guard reader.place == reader.bytes.count else { throw Invalid() }
    }

    /// The value as JSON, with sorted keys and with the separators `, ` and `: `.
    package var json: String {
        switch self {
        case .null, .deep: "null"
        case .bool(let truth): truth ? "true" : "false"
        case .integer(let number): String(number)
        case .number(let number): String(number)
        case .string(let text): "\"\(Self.escaped(text))\""
        case .array(let values): "[\(values.map(\.json).joined(separator: ", "))]"
        case .object(let fields):
            "{\(fields.sorted { $0.key < $1.key }.map { "\"\(Self.escaped($0))\": \($1.json)" }.joined(separator: ", "))}"
        }
    }

    /// Returns a text escaped for a JSON string. `inASCII` also escapes all characters outside of ASCII.
    package static func escaped(_ text: String, inASCII: Bool = false) -> String {
        func hex(_ unit: UInt16) -> String {
            let digits = String(unit, radix: 16)
            return "\\u" + String(repeating: "0", count: 4 - digits.count) + digits
        }
        return text.unicodeScalars.reduce(into: "") { result, scalar in
            switch scalar {
            case "\"": result += "\\\""
            case "\\": result += "\\\\"
            case "\n": result += "\\n"
            case "\r": result += "\\r"
            case "\t": result += "\\t"
            case "\u{8}": result += "\\b"
            case "\u{C}": result += "\\f"
            case _ where scalar.value < 0x20 || inASCII && scalar.value > 0x7F:
                result += String(scalar).utf16.map(hex).joined()
            default: result.unicodeScalars.append(scalar)
            }
        }
    }

    private struct Invalid: Error {}

    private struct Reader {
        let bytes: [UInt8]
        var place = 0

        var next: UInt8? { place < bytes.count ? bytes[place] : nil }

        mutating func passSpace() {
            while let byte = next, [0x20, 0x0A, 0x0D, 0x09].contains(byte) { place += 1 }
        }

        mutating func take(_ text: StaticString) -> Bool {
            let isNext = text.withUTF8Buffer { bytes[place...].starts(with: $0) }
            if isNext { place += text.utf8CodeUnitCount }
            return isNext
        }

        mutating func value(level: Int) throws -> JSONValue {
            guard level < Bounds.jsonLevels else { throw Invalid() }
            passSpace()
            if next == UInt8(ascii: "\"") { return .string(try string()) }
            if take("{") { return .object(try object(level: level + 1)) }
            if take("[") { return .array(try array(level: level + 1)) }
            if take("null") { return .null }
            if take("true") { return .bool(true) }
            if take("false") { return .bool(false) }
            return try number()
        }

        private mutating func object(level: Int) throws -> [String: JSONValue] {
            var fields = [String: JSONValue]()
            passSpace()
            if take("}") { return fields }
            while true {
                passSpace()
                let key = try string()
                passSpace()
                guard take(":"), fields[key] == nil else { throw Invalid() }
                fields[key] = try value(level: level)
                passSpace()
                if take("}") { return fields }
                guard take(",") else { throw Invalid() }
            }
        }

        private mutating func array(level: Int) throws -> [JSONValue] {
            var values = [JSONValue]()
            passSpace()
            if take("]") { return values }
            while true {
                values.append(try value(level: level))
                passSpace()
                if take("]") { return values }
                guard take(",") else { throw Invalid() }
            }
        }

        private mutating func digits() -> Int {
            let start = place
            while let byte = next, (0x30...0x39).contains(byte) { place += 1 }
            return place - start
        }

        private mutating func number() throws -> JSONValue {
            let start = place
            _ = take("-")
            let isZero = next == UInt8(ascii: "0")
            let count = digits()
            guard count == 1 || count > 1 && !isZero else { throw Invalid() }
            var isWhole = true
            if take(".") {
                isWhole = false
                guard digits() > 0 else { throw Invalid() }
            }
            if take("e") || take("E") {
                isWhole = false
                if !take("+") { _ = take("-") }
                guard digits() > 0 else { throw Invalid() }
            }
            let text = String(decoding: bytes[start..<place], as: UTF8.self)
            if isWhole, let number = Int(text) { return .integer(number) }
            guard let number = Double(text), number.isFinite else { throw Invalid() }
            return .number(number)
        }

        private mutating func string() throws -> String {
            guard take("\"") else { throw Invalid() }
            var text = [UInt8]()
            while let byte = next {
                place += 1
                switch byte {
                case UInt8(ascii: "\""):
                    guard let text = String(bytes: text, encoding: .utf8) else { throw Invalid() }
                    return text
                case UInt8(ascii: "\\"): text += Array(String(try escape()).utf8)
                case ..<0x20: throw Invalid()
                default: text.append(byte)
                }
            }
            throw Invalid()
        }

        private mutating func escape() throws -> Unicode.Scalar {
            guard let byte = next else { throw Invalid() }
            place += 1
            switch byte {
            case UInt8(ascii: "\""), UInt8(ascii: "\\"), UInt8(ascii: "/"): return Unicode.Scalar(byte)
            case UInt8(ascii: "b"): return "\u{8}"
            case UInt8(ascii: "f"): return "\u{C}"
            case UInt8(ascii: "n"): return "\n"
            case UInt8(ascii: "r"): return "\r"
            case UInt8(ascii: "t"): return "\t"
            case UInt8(ascii: "u"):
                let unit = try hex()
                if let scalar = Unicode.Scalar(unit) { return scalar }
                guard unit < 0xDC00, take("\\u") else { throw Invalid() }
                let low = try hex()
                guard (0xDC00...0xDFFF).contains(low),
                    let scalar = Unicode.Scalar(0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00))
                else { throw Invalid() }
                return scalar
            default: throw Invalid()
            }
        }

        private mutating func hex() throws -> UInt32 {
            guard place + 4 <= bytes.count else { throw Invalid() }
            let digits = bytes[place..<place + 4]
            guard digits.allSatisfy({ Unicode.Scalar($0).properties.isASCIIHexDigit }),
                let unit = UInt32(String(decoding: digits, as: UTF8.self), radix: 16)
            else { throw Invalid() }
            place += 4
            return unit
        }
    }
}
