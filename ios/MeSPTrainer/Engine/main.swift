// mesp-engine SETTINGS.json: one training run. Prints the log's records as they are written; mesp-train drives it.
// mesp-engine generate SETTINGS.json: writes on from a prompt. Prints a record for each token; mesp-generate drives it.

import Foundation
import MeSPCore

// Set by a signal; read at every block.
nonisolated(unsafe) var stopRequested: sig_atomic_t = 0
signal(SIGINT) { _ in stopRequested = 1 }
signal(SIGTERM) { _ in stopRequested = 1 }

func fail(_ message: String) -> Never {
    FileHandle.standardError.write(Data((message + "\n").utf8))
    exit(2)
}

func checkStop() throws { if stopRequested != 0 { throw CancellationError() } }

func train(_ file: URL) throws {
    try Run.run(
        RunSettings(contentsOf: file), report: { _, line in try FileHandle.standardOutput.write(contentsOf: line) },
        atBlock: { _ in try checkStop() })
}

func generate(_ file: URL) throws {
    let settings = try GenerationSettings(contentsOf: file)
    let generator = try Generator(
        ModelBundle(url: URL(fileURLWithPath: settings.bundle)),
        adapters: settings.adapters.map { URL(fileURLWithPath: $0) })
    let summary = try generator.generate(
        settings.request, atBlock: checkStop,
        onToken: { try print("token", ["token": $0]) })
    try print("end", summary)
}

/// Prints `fields` and their type as one line of JSON.
func print(_ type: String, _ fields: any Encodable) throws {
    struct Line: Encodable {
        let type: String
        let fields: any Encodable

        func encode(to encoder: any Encoder) throws {
            try ["type": type].encode(to: encoder)
            try fields.encode(to: encoder)
        }
    }
    let encoder = JSONEncoder()
    encoder.keyEncodingStrategy = .convertToSnakeCase
    let line = try encoder.encode(Line(type: type, fields: fields)) + Data("\n".utf8)
    try FileHandle.standardOutput.write(contentsOf: line)
}

do {
    let arguments = CommandLine.arguments.dropFirst()
    switch (arguments.count, arguments.first) {
    case (2, "generate"): try generate(URL(fileURLWithPath: arguments[2]))
    case (1, let file?): try train(URL(fileURLWithPath: file))
    default: fail("usage: mesp-engine [generate] SETTINGS.json")
    }
} catch {
    fail(error.localizedDescription)
}
