import Foundation
import Testing

@testable import MeSPAppModel
@testable import MeSPCore

/// What `tests/check_mission.py` lets the app do on a phone: it has put a bundle into the folder of documents that `MESP_DOCUMENTS` names,
/// and collects the run from there.
@Suite(.enabled(if: MissionTests.documents != nil)) @MainActor struct MissionTests {
    nonisolated static let documents = ProcessInfo.processInfo.environment["MESP_DOCUMENTS"]

    @Test func trainsWhatWasPushedWithTheSettingsThatTheAppProposes() async throws {
        let documents = URL(fileURLWithPath: try #require(Self.documents))
        let model = AppModel(phone: TestPhone(), folder: DocumentsFolder(documents: documents)) { _ in ByteTokenizer() }
        await model.refresh()
        #expect(model.library.usableBundles.count == 1 && model.form.bundle == model.library.usableBundles.first)
        let steps = try #require(ProcessInfo.processInfo.environment["MESP_STEPS"].flatMap { Int($0) })
        (model.form.settings.steps, model.form.settings.valBatches) = (steps, 8)
        #expect(model.startProblem == nil && model.canStart)
        await model.start()
        while !model.isFree { try await Task.sleep(for: .milliseconds(50)) }
        await model.refresh()
        #expect(model.shownRun?.status == .finished)
    }
}
