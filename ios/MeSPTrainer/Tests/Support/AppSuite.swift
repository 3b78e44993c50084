import Foundation
import MeSP
import Testing

@testable import MeSPAppModel
@testable import MeSPControl
@testable import MeSPCore

@MainActor class AppSuite {
    typealias LoadTokenizer = @Sendable (URL) async throws -> any TextTokenizer

    let documents = newFolder()
    let monitor = TestMonitor()
    lazy var model = makeModel { _ in ByteTokenizer() }

    init() throws {}

    func makeModel(_ loadTokenizer: @escaping LoadTokenizer) -> AppModel {
        AppModel(monitor: monitor, folder: DocumentsFolder(documents: documents), loadTokenizer: loadTokenizer)
    }

    func importTied(steps: Int? = nil) async throws {
        await model.importBundle(at: try tiedBundle())
        #expect(model.problem == nil)
        model.form.settings.valBatches = 0
        model.form.settings.steps = steps ?? model.form.settings.steps
    }

    func wait(until condition: () -> Bool) async throws {
        let limit = Date(timeIntervalSinceNow: 900)  // a hang, and no slow machine
        while !condition() {
            try #require(Date.now < limit, "the run is \(model.controller.state)")
            try await Task.sleep(for: .milliseconds(2))
        }
    }

    func ended() async throws {
        try await wait { model.isFree }
        await model.refresh()
    }

    func train() async throws {
        await model.startTraining()
        try await ended()
    }

    func stop() async throws {
        model.controller.stop()
        try await ended()
    }

    func write(_ request: SideBySideChat.Request) async throws {
        await model.write(request)
        try await ended()
    }

    func file(_ name: String, _ text: String) throws -> URL {
        let file = documents.appendingPathComponent(name)
        try file.write(text)
        return file
    }
}

extension SideBySideChat.Request {
    init(_ prompt: String, maxTokens: Int, isChat: Bool = false, system: String = "") {
        self.init()
        (self.prompt, self.maxTokens, self.isChat, self.system) = (prompt, maxTokens, isChat, system)
    }
}
