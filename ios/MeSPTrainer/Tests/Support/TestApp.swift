import Foundation
import Testing

@testable import MeSPAppModel
@testable import MeSPCore

@MainActor final class TestApp {
    private let documents = temporaryFolder()
    let monitor = TestMonitor()
    let model: AppModel

    init() throws {
        try FileManager.default.createDirectory(at: documents, withIntermediateDirectories: true)
        model = AppModel(monitor: monitor, folder: DocumentsFolder(documents: documents)) { _ in ByteTokenizer() }
    }
    deinit { try? FileManager.default.removeItem(at: documents) }

    func importTied() async throws {
        let fixture = try #require(Fixture.tied).appendingPathComponent("bundle.mesp").resolvingSymlinksInPath()
        await model.importBundle(at: fixture)
        model.form.settings.valBatches = 0
    }

    func ended() async throws {
        while !model.isFree { try await Task.sleep(for: .milliseconds(5)) }
        await model.refresh()
    }
}
