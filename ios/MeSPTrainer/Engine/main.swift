// mesp-engine SETTINGS.json: one training run. Prints the log's records as they are written; mesp-train drives it.

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

guard CommandLine.arguments.count == 2 else { fail("usage: mesp-engine SETTINGS.json") }
do {
    let settings = try RunSettings(contentsOf: URL(fileURLWithPath: CommandLine.arguments[1]))
    try Run.run(
        settings, report: { _, line in try FileHandle.standardOutput.write(contentsOf: line) },
        atBlock: { _ in if stopRequested != 0 { throw CancellationError() } })
} catch {
    fail(error.localizedDescription)
}
