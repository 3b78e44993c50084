// Usage:
//
//     mesp-count SETTINGS.json  # prints the costs of a step on a phone's GPU as one line of JSON
//     mesp-count --version  # prints its version and MLX's version
//
// `mesp train --dry-run` runs it.

import Foundation

@testable import MeSPBundle
@testable import MeSPCore
@testable import MeSPSentences

func fail(_ message: String) -> Never {
    FileHandle.standardError.write(Data((message + "\n").utf8))
    exit(2)
}

guard CommandLine.arguments.count == 2 else { fail("usage: mesp-count SETTINGS.json, or mesp-count --version") }
if CommandLine.arguments[1] == "--version" {
    print("mesp-count \(Run.version) with MLX \(MLXSupport.version)")
} else {
    MLXSupport.setEnvironment()
    do {
        let encoder = JSONEncoder()
        encoder.keyEncodingStrategy = .convertToSnakeCase
        let count = try StepCount(RunSettings(contentsOf: URL(fileURLWithPath: CommandLine.arguments[1])))
        FileHandle.standardOutput.write(try encoder.encode(count) + Data("\n".utf8))
    } catch {
        fail((error as? MeSPError)?.sentence.english ?? error.localizedDescription)
    }
}
