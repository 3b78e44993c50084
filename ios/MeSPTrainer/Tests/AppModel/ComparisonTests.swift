import Foundation
import Testing

@testable import MeSPAppModel
@testable import MeSPCore

@Suite(.serialized) @MainActor final class ComparisonTests {
    private let phone = TestPhone()
    private let folder = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
    private lazy var comparison = Comparison(phone: phone)
    deinit { try? FileManager.default.removeItem(at: folder) }

    private func bundle() throws -> URL { try #require(Fixture.tied).appendingPathComponent("bundle.mesp") }

    private func request(_ tokens: Int) -> Comparison.Request {
        var request = Comparison.Request()
        (request.prompt, request.maxTokens) = ("The quick", tokens)
        return request
    }

    /// Tokens of the tiny model's vocabulary as text.
    private struct Numbers: TextTokenizer {
        let endOfText: Int? = nil
        let hasChatTemplate = false
        func encode(_ text: String) -> [Int] { text.utf8.map { Int($0) } }
        func decode(_ tokens: [Int]) -> String { tokens.map(String.init).joined(separator: " ") }
        func encode(_ messages: [ChatMessage], opensAnswer: Bool) -> [Int] { [] }
    }

    private func written() async throws {
        while comparison.writing != nil { try await Task.sleep(for: .milliseconds(2)) }
    }

    @Test func bothModelsWrite() async throws {
        var settings = RunSettings(bundle: try bundle().path, output: folder.path)
        (settings.seqLen, settings.steps, settings.learningRate, settings.valBatches) = (32, 3, 1, 0)
        try Run.run(settings)
        comparison.start(
            request(6), bundle: try bundle(), adapters: folder.appendingPathComponent("adapters"), tokenizer: Numbers())
        #expect(comparison.writing == .base)
        try await written()
        #expect(comparison.problem == nil)
        #expect(comparison.base.summary?.tokens == 6 && comparison.tuned.summary?.tokens == 6)
        #expect(comparison.base.text.split(separator: " ").count == 6)
        #expect(comparison.base.text != comparison.tuned.text, "training changed nothing")
    }

    @Test func withoutAdaptersOnlyTheBaseModelWrites() async throws {
        comparison.start(request(3), bundle: try bundle(), adapters: nil, tokenizer: Numbers())
        try await written()
        #expect(comparison.base.summary?.reason == .length && comparison.tuned.summary == nil)
    }

    @Test func stopsBoth() async throws {
        comparison.start(request(1_000_000), bundle: try bundle(), adapters: nil, tokenizer: Numbers())
        while comparison.base.text.isEmpty { try await Task.sleep(for: .milliseconds(2)) }
        comparison.stop()
        try await written()
        #expect(comparison.base.summary?.reason == .stopped)
    }

    @Test func waitsWhileTheAppIsNotInFront() async throws {
        comparison.start(request(1_000_000), bundle: try bundle(), adapters: nil, tokenizer: Numbers())
        while comparison.base.text.isEmpty { try await Task.sleep(for: .milliseconds(2)) }
        phone.scene = .background
        var text = ""
        while comparison.base.text != text {  // what was on its way arrives
            text = comparison.base.text
            try await Task.sleep(for: .milliseconds(300))
        }
        phone.scene = .active
        while comparison.base.text == text { try await Task.sleep(for: .milliseconds(2)) }
        comparison.stop()
        try await written()
    }

    @Test func aBundleThatIsGoneGivesASentence() async throws {
        comparison.start(request(1), bundle: URL(fileURLWithPath: "/nowhere"), adapters: nil, tokenizer: Numbers())
        try await written()
        #expect(comparison.problem?.hasPrefix("/nowhere is not a bundle") == true)
    }
}
