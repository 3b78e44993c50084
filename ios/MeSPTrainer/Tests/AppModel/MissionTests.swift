import Foundation
import Testing

@testable import MeSPAppModel
@testable import MeSPCore

private let documents = ProcessInfo.processInfo.environment["MESP_DOCUMENTS"]

@MainActor struct MissionTests {
    @Test(.enabled(if: documents != nil, "tests/test_mission.py starts it"))
    func trainsWhatWasPushedWithTheSettingsThatTheAppProposes() async throws {
        let folder = DocumentsFolder(documents: URL(fileURLWithPath: try #require(documents)))
        let model = AppModel(monitor: TestMonitor(), folder: folder) { _ in ByteTokenizer() }
        await model.refresh()
        #expect(model.library.usableBundles.count == 1)
        let steps = try #require(ProcessInfo.processInfo.environment["MESP_STEPS"].flatMap { Int($0) })
        (model.form.settings.steps, model.form.settings.valBatches) = (steps, 8)
        #expect(model.startProblem == nil && model.canStart)
        await model.startTraining()
        while !model.isFree { try await Task.sleep(for: .milliseconds(50)) }
        await model.refresh()
        #expect(model.shownRun?.status == .finished)
    }
}
