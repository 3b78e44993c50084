import Foundation
import MLX
import Testing

@testable import MeSPCore

/// The folder of `temporaryFolder`, which is removed when the process ends.
private let temporaryFolders: URL = {
    let folder = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
    try? folder.makeFolder()
    atexit { try? FileManager.default.removeItem(at: temporaryFolders) }
    return folder
}()

func temporaryFolder() -> URL { temporaryFolders.appendingPathComponent(UUID().uuidString) }

func newFolder() -> URL {
    let folder = temporaryFolder()
    try? folder.makeFolder()
    return folder
}

extension URL {
    var exists: Bool { FileManager.default.fileExists(atPath: path) }

    func makeFolder() throws { try FileManager.default.createDirectory(at: self, withIntermediateDirectories: true) }

    func copy(to other: URL) throws { try FileManager.default.copyItem(at: resolvingSymlinksInPath(), to: other) }

    func copy() throws -> URL {
        let other = temporaryFolder()
        try copy(to: other)
        return other
    }

    func link(to target: URL) throws {
        try FileManager.default.createSymbolicLink(at: self, withDestinationURL: target)
    }

    func write(_ text: String) throws { try Data(text.utf8).write(to: self) }

    func readText() throws -> String { try String(contentsOf: self, encoding: .utf8) }

    func replace(_ text: String, with other: String) throws { try write(readText().replacing(text, with: other)) }

    func readJSON() throws -> [String: Any] {
        try #require(try JSONSerialization.jsonObject(with: Data(contentsOf: self)) as? [String: Any])
    }

    func changeJSON(_ change: (inout [String: Any]) throws -> Void) throws {
        var json = try readJSON()
        try change(&json)
        try JSONSerialization.data(withJSONObject: json).write(to: self)
    }

    func flipBit(ofByte index: Int? = nil) throws {
        var data = try Data(contentsOf: self)
        data[index ?? data.count - 1] ^= 1
        try data.write(to: self)
    }
}

func tiedBundle() throws -> URL {
    try #require(Fixture.tied).appendingPathComponent("bundle.mesp").resolvingSymlinksInPath()
}

let appSources = URL(fileURLWithPath: #filePath + "/../../..").standardizedFileURL

let demoBundle = appSources.appendingPathComponent("Demo.mesp")

func copyWithoutFunctions(_ bundle: URL) throws -> URL {
    let copy = try bundle.copy()
    let file = copy.appendingPathComponent("manifest.json")
    try file.write(file.readText().replacing(#/functions": {[^}]*}/#, with: "functions\": {}"))
    return copy
}

func logRecords(_ run: URL, _ type: String? = nil) throws -> [[String: Any]] {
    try LogWriter.url(in: run).readText().split(separator: "\n")
        .map { try #require(try JSONSerialization.jsonObject(with: Data($0.utf8)) as? [String: Any]) }
        .filter { type == nil || $0["type"] as? String == type }
}

func adapterArrays(of run: URL) throws -> [String: MLXArray] {
    try loadArrays(url: run.appendingPathComponent("adapters/adapters.safetensors"))
}

extension Generator.Request {
    init(_ prompt: [Int], maxTokens: Int) {
        self.init(prompt: prompt)
        self.maxTokens = maxTokens
    }
}

extension Generator {
    func text(_ prompt: [Int], maxTokens: Int) throws -> [Int] { try text(.init(prompt, maxTokens: maxTokens)) }

    func text(_ request: Request) throws -> [Int] {
        var text = [Int]()
        try generate(request) { text.append($0) }
        return text
    }

    func text(_ prompt: [Int], maxTokens: Int, continuing cache: inout PromptCache) throws -> (text: [Int], blocks: Int)
    {
        var (text, blocks) = ([Int](), 0)
        let request = Request(prompt, maxTokens: maxTokens)
        try generate(request, continuing: &cache, atBlock: { blocks += 1 }, onToken: { text.append($0) })
        return (text, blocks)
    }
}

extension LogRecord.Step {
    static func ofATest(_ step: Int, loss: Float = 1, seconds: Double = 1, thermalState: String = "") -> Self {
        .init(
            step: step, loss: loss, seconds: seconds, forwardSeconds: 0, lossSeconds: 0, backwardSeconds: 0,
            tokens: 256, learningRate: 1, footprintBytes: 1, footprintPeakBytes: 2, mlxActiveBytes: 3, mlxPeakBytes: 4,
            mlxCacheBytes: 5, writtenBytes: 6, thermalState: thermalState)
    }
}
