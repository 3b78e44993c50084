import Foundation
import MeSPSentences

extension JSONDecoder {
    package static var snakeCase: JSONDecoder {
        let decoder = JSONDecoder()
        decoder.keyDecodingStrategy = .convertFromSnakeCase
        return decoder
    }
}

extension JSONEncoder {
    package static var snakeCase: JSONEncoder {
        let encoder = JSONEncoder()
        encoder.keyEncodingStrategy = .convertToSnakeCase
        return encoder
    }
}

package struct JoinedObject: Encodable {
    private let parts: [any Encodable]

    package init(_ parts: any Encodable...) { self.parts = parts }

    package func encode(to encoder: any Encoder) throws {
        for part in parts { try part.encode(to: encoder) }
    }
}

package func readSettings<Settings: Decodable>(_ url: URL) throws -> Settings {
    guard let json = shortFile(url, longest: Bounds.jsonBytes, followsLinks: true) else {
        throw MeSPError("Cannot read the settings file \(url.path).")
    }
    do {
        return try JSONDecoder.snakeCase.decode(Settings.self, from: json)
    } catch {
        throw MeSPError("The settings file \(url.path) is not valid: \(error.plainSentence).")
    }
}
