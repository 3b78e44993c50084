import Foundation
import Testing

@testable import MeSPAppModel
@testable import MeSPCore

/// The app's model, with a folder of documents of its own.
@MainActor final class TestApp {
    private let documents = temporaryFolder()
    let monitor = TestMonitor()
    let model: AppModel

    init() throws {
        try FileManager.default.createDirectory(at: documents, withIntermediateDirectories: true)
        model = AppModel(monitor: monitor, folder: DocumentsFolder(documents: documents)) { _ in ByteTokenizer() }
    }
    deinit { try? FileManager.default.removeItem(at: documents) }

    /// Brings the plain fixture in, to be trained without evaluations.
    func importTied() async throws {
        let fixture = try #require(Fixture.tied).appendingPathComponent("bundle.mesp").resolvingSymlinksInPath()
        await model.importBundle(at: fixture)
        model.form.settings.valBatches = 0
    }

    /// Waits until what was begun has ended.
    func ended() async throws {
        while !model.isFree { try await Task.sleep(for: .milliseconds(5)) }
        await model.refresh()
    }
}
