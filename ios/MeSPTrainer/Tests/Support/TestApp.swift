import Foundation
import Testing

@testable import MeSPAppModel
@testable import MeSPCore

/// The app's model, with its own Documents folder.
@MainActor final class TestApp {
    private let documents = temporaryFolder()
    let monitor = TestMonitor()
    let model: AppModel

    init() throws {
        try FileManager.default.createDirectory(at: documents, withIntermediateDirectories: true)
        model = AppModel(monitor: monitor, folder: DocumentsFolder(documents: documents)) { _ in ByteTokenizer() }
    }
    deinit { try? FileManager.default.removeItem(at: documents) }

    /// Imports the plain fixture, to train without evaluations.
    func importTied() async throws {
        let fixture = try #require(Fixture.tied).appendingPathComponent("bundle.mesp").resolvingSymlinksInPath()
        await model.importBundle(at: fixture)
        model.form.settings.valBatches = 0
    }

    /// Waits until the work in progress has ended.
    func ended() async throws {
        while !model.isFree { try await Task.sleep(for: .milliseconds(5)) }
        await model.refresh()
    }
}
