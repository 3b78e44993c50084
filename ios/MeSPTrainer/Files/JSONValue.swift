import Foundation

package enum JSONValue: Codable, Sendable, Hashable {
    case null
    case bool(Bool)
    case integer(Int)
    /// A number that is not an `integer`, such as 0.5 or 1e30.
    case number(Double)
    case string(String)
    case array([JSONValue])
    case object([String: JSONValue])
    /// An array or an object beyond the decoder's maximum depth.
    case deep

    /// The maximum depth that a decoder reads. Each level takes stack space.
    private static let levels = 16

    /// Any key of an object.
    package struct Key: CodingKey {
        package let stringValue: String
        package let intValue: Int? = nil
        package init(stringValue: String) { self.stringValue = stringValue }
        package init?(intValue: Int) { return nil }
    }

    package init(from decoder: any Decoder) throws {
        let value = try decoder.singleValueContainer()
        if let text = try? value.decode(String.self) {
            self = .string(text)
        } else if value.decodeNil() {
            self = .null
        } else if let truth = try? value.decode(Bool.self) {
            self = .bool(truth)
        } else if let number = try? value.decode(Int.self) {
            self = .integer(number)
        } else if let number = try? value.decode(Double.self) {
            self = .number(number)
        } else if decoder.codingPath.count >= Self.levels {
            self = .deep
        } else if let fields = try? decoder.container(keyedBy: Key.self) {
            let pairs = try fields.allKeys.map { ($0.stringValue, try fields.decode(JSONValue.self, forKey: $0)) }
            self = .object(Dictionary(pairs) { $1 })
        } else {
            var items = try decoder.unkeyedContainer()
            var values = [JSONValue]()
            while !items.isAtEnd { values.append(try items.decode(JSONValue.self)) }
            self = .array(values)
        }
    }

    package func encode(to encoder: any Encoder) throws {
        var container = encoder.singleValueContainer()
        switch self {
        case .null, .deep: try container.encodeNil()
        case .bool(let truth): try container.encode(truth)
        case .integer(let number): try container.encode(number)
        case .number(let number): try container.encode(number)
        case .string(let text): try container.encode(text)
        case .array(let values): try container.encode(values)
        case .object(let fields): try container.encode(fields)
        }
    }

    /// Whether the value is null or an empty string, array or object.
    package var isEmpty: Bool {
        switch self {
        case .null: true
        case .string(let text): text.isEmpty
        case .array(let values): values.isEmpty
        case .object(let fields): fields.isEmpty
        case .bool, .integer, .number, .deep: false
        }
    }

    package var string: String? {
        if case .string(let text) = self { text } else { nil }
    }

    package var array: [JSONValue]? {
        if case .array(let values) = self { values } else { nil }
    }

    /// The fields of an object, without those that are null; nil if the value is not an object.
    package var fields: [String: JSONValue]? {
        if case .object(let fields) = self { fields.filter { $0.value != .null } } else { nil }
    }
}
