import Testing

@testable import MeSPFiles

@Suite struct JSONTextTests {
    @Test(arguments: [
        (#" {"b": [1, -2.5, 1.0, 1e2, true, null], "a": {}} "#, #"{"a": {}, "b": [1, -2.5, 1.0, 100.0, true, null]}"#),
        (#""\ud83d\ude00 \u00e9\/\b\f\n\r\t\"\\ é\u0001""#, #""😀 é/\b\f\n\r\t\"\\ é\u0001""#),
        ("[]", "[]"), ("0", "0"), ("-0", "0"), ("9223372036854775807", "9223372036854775807"),
    ]) func isReadAndWritten(_ text: String, _ expected: String) throws {
        #expect(try JSONValue(json: text.utf8).json == expected)
    }

    @Test(arguments: [
        "", "{", "[1,]", "{\"a\"}", "{\"a\": 1,}", "01", "1.", "1e", "-", "+1", ".5", "NaN", "Infinity", "tru", "[1] 2",
        "'a'",
        "\"a", "\"\n\"", "\"\\x\"", "\"\\u12g4\"", "\"\\u+123\"", "\"\\ud83d\"", "\"\\ude00\"", "\"\\ud83d\\u0041\"",
        "{\"a\": 1, \"a\": 2}", "{1: 2}", String(repeating: "[", count: 1_000_000),
        String(repeating: "[", count: 101) + String(repeating: "]", count: 101),
    ]) func whatPythonRefusesIsRefused(_ text: String) {
        #expect(throws: (any Error).self) { try JSONValue(json: text.utf8) }
    }

    @Test func bytesThatAreNoTextAreRefused() {
        #expect(throws: (any Error).self) { try JSONValue(json: [0x22, 0xFF, 0x22]) }
    }

    @Test func noDamageEndsTheProcess() throws {
        let sound = Array(#"{"a": ["é\ud83d\ude00", -1.5e+3, true], "b": {"c": null, "d": ""}}"#.utf8)
        for index in sound.indices {
            for byte in UInt8.min...UInt8.max {
                var changed = sound
                changed[index] = byte
                if let value = try? JSONValue(json: changed) { #expect(try JSONValue(json: value.json.utf8) == value) }
            }
            _ = try? JSONValue(json: sound[..<index] + sound[(index + 1)...])
            _ = try? JSONValue(json: sound[...index] + sound[index...])
        }
    }
}
