import Foundation
import Testing

@testable import MeSPAppModel
@testable import MeSPCore
@testable import MeSPFiles
@testable import MeSPSelfCheck

@Suite(.serialized) @MainActor final class SelfCheckerTests {
    private let documents = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
    private let phone = TestPhone()
    private lazy var model = AppModel(phone: phone, folder: DocumentsFolder(documents: documents)) { _ in
        ByteTokenizer()
    }

    init() throws { try FileManager.default.createDirectory(at: documents, withIntermediateDirectories: true) }
    deinit { try? FileManager.default.removeItem(at: documents) }

    private var bundle: String {
        get throws { try #require(Fixture.tied).appendingPathComponent("bundle.mesp").path }
    }

    private func ended() async throws {
        while model.selfChecker.isRunning { try await Task.sleep(for: .milliseconds(5)) }
    }

    /// Quick, where what is found does not matter.
    private func quick() throws -> SelfCheck.Settings {
        var settings = SelfCheck.Settings(bundle: try bundle)
        (settings.repeats, settings.seconds) = (2, 0.01)
        return settings
    }

    @Test func theReportIsOnTheScreenAndInAFile() async throws {
        let (checker, file) = (model.selfChecker, model.library.folder.newSelfCheck(bundle: "tiny"))
        checker.start(try quick(), file: file)
        #expect(checker.isRunning && !model.isFree && model.staysAwake)
        try await ended()
        #expect(checker.problem == nil && checker.current == nil && !model.staysAwake)
        let report = try #require(checker.report)
        #expect(report.end?.verdict == .pass && report.checks.count == report.start.names.count)
        #expect(file.deletingLastPathComponent().lastPathComponent == "self-check")
        let written = try JSONDecoder.snakeCase.decode(SelfCheckReport.self, from: Data(contentsOf: file))
        #expect(written.checks.map(\.name) == report.checks.map(\.name) && written.end != nil)
    }

    @Test func theLaunchArgumentStartsItAndStoppingKeepsWhatThereIs() async throws {
        await model.importBundle(at: URL(fileURLWithPath: try bundle).resolvingSymlinksInPath())
        model.begin(arguments: ["MeSPTrainer"])
        #expect(!model.selfChecker.isRunning)
        model.begin(arguments: ["MeSPTrainer", "--self-check", "other.mesp"])
        #expect(model.problem == "There is no usable bundle other.mesp." && !model.selfChecker.isRunning)
        model.begin(arguments: ["MeSPTrainer", "--self-check", "bundle.mesp"])
        #expect(model.selfChecker.isRunning)
        while (model.selfChecker.report?.checks.count ?? 0) < 2 { try await Task.sleep(for: .milliseconds(5)) }
        #expect(model.selfChecker.current != nil)
        model.selfChecker.stop()
        try await ended()
        #expect(model.selfChecker.problem == "The self-check was stopped.")
        let folder = model.library.folder.selfChecksFolder
        let files = try FileManager.default.contentsOfDirectory(at: folder, includingPropertiesForKeys: nil)
        #expect(files.count == 1 && files[0].pathExtension == "json")
    }

    @Test func itWaitsWhileTheAppIsAway() async throws {
        phone.scene = .background
        model.selfChecker.start(try quick(), file: documents.appendingPathComponent("a.json"))
        try await Task.sleep(for: .milliseconds(300))
        #expect(model.selfChecker.report?.checks.isEmpty ?? true)
        phone.scene = .active
        try await ended()
        #expect(model.selfChecker.report?.end != nil)
    }

    @Test func aBundleThatIsNoneIsASentence() async throws {
        model.selfChecker.start(.init(bundle: "/nowhere"), file: documents.appendingPathComponent("a.json"))
        try await ended()
        #expect(
            model.selfChecker.problem?.english.contains("is not a bundle") == true && model.selfChecker.report == nil)
    }
}
