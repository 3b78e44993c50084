import Foundation
import Testing

@testable import MeSPAppModel
@testable import MeSPBundle
@testable import MeSPCore
@testable import MeSPFiles
@testable import MeSPImport

@Suite(.serialized) @MainActor final class ImportModelTests: AppSuite {
    private let files = FileManager.default
    private let source = temporaryFolder().appendingPathComponent("tiny-4bit")

    override init() throws {
        try super.init()
        try TinyModel.write(to: source)
    }

    private func makeModel(freeBytes: Int?) -> AppModel {
        AppModel(
            monitor: monitor, folder: DocumentsFolder(documents: documents, freeBytes: { _ in freeBytes })
        ) { _ in ByteTokenizer() }
    }

    private func digests() throws -> [String: String] {
        let names = try files.contentsOfDirectory(atPath: source.path)
        return try Dictionary(
            uniqueKeysWithValues: names.map { ($0, try sha256(of: source.appendingPathComponent($0))) })
    }

    private func contents() throws -> [String] { try files.contentsOfDirectory(atPath: documents.path) }

    private var hasEnded = false

    private func begin(_ model: AppModel, at url: URL? = nil) async throws -> Task<Void, Never> {
        hasEnded = false
        let work = Task {
            await model.importBundle(at: url ?? source)
            hasEnded = true
        }
        try await wait { model.asksToImport || hasEnded }
        return work
    }

    @Test func aModelIsRewrittenWhenThePersonHasConfirmedItsSize() async throws {
        let original = try digests()
        let work = try await begin(model)
        let opened = try ModelImport(model: source)
        #expect(
            model.importQuestion.first
                == "tiny-4bit is rewritten into a bundle of \(opened.size.megabytes). The folder that you chose stays as it is."
        )
        #expect(model.importQuestion.dropFirst().elementsEqual(opened.notices))
        #expect(try contents() == [], "nothing is written before the answer")
        model.answerImport(true)
        await work.value
        #expect(model.problem == nil && model.form.bundle?.id == "tiny-4bit.mesp" && !model.asksToImport)
        #expect(model.library.importing == nil && model.library.rewritten == nil)
        #expect(try contents() == ["tiny-4bit.mesp"])
        _ = try ModelBundle(url: documents.appendingPathComponent("tiny-4bit.mesp"))
        #expect(try digests() == original)
        _ = try await begin(model)
        #expect(model.problem == "There is a bundle tiny-4bit.mesp already; delete it first.")
    }

    @Test func aModelThatIsNotWantedIsNotRewritten() async throws {
        let work = try await begin(model)
        model.asksToImport = false
        #expect(model.asksToImport, "only an answer ends the question")
        await model.importBundle(at: source)
        #expect(model.problem == "tiny-4bit is being imported; wait for it.")
        model.problem = nil
        model.answerImport(false)
        await work.value
        #expect(model.problem == nil && model.library.importing == nil)
        #expect(try contents() == [])
    }

    @Test func aModelInTheAppsOwnFolderIsRewrittenToo() async throws {
        let inside = documents.appendingPathComponent("tiny-4bit")
        try files.moveItem(at: source, to: inside)
        let work = try await begin(model, at: inside)
        model.answerImport(true)
        await work.value
        #expect(model.problem == nil && model.form.bundle?.id == "tiny-4bit.mesp")
        #expect(try contents().sorted() == ["tiny-4bit", "tiny-4bit.mesp"])
    }

    @Test func withoutRoomNothingIsAsked() async throws {
        let size = try ModelImport(model: source).size
        let small = makeModel(freeBytes: size + DocumentsFolder.spareBytes - 1)
        let work = try await begin(small)
        #expect(!small.asksToImport)
        small.answerImport(false)
        await work.value
        #expect(small.problem?.english.hasPrefix("tiny-4bit takes \(size.megabytes(.up)), and the phone has ") == true)
        #expect(try contents() == [])
        let large = makeModel(freeBytes: size + DocumentsFolder.spareBytes)
        let other = try await begin(large)
        #expect(large.asksToImport)
        large.answerImport(false)
        await other.value
    }

    @Test func aFolderThatIsNoModelSaysWhy() async throws {
        let config = source.appendingPathComponent("config.json")
        try config.write("{}")
        let sentence = message { _ = try ModelImport(model: source) }
        await model.importBundle(at: source)
        #expect(!sentence.isEmpty && model.problem?.english == sentence)
        try files.removeItem(at: config)
        await model.importBundle(at: source)
        #expect(
            model.problem
                == "tiny-4bit is neither a bundle, a folder whose name ends in .mesp, nor a model's folder with a config.json."
        )
        #expect(model.library.importing == nil)
        #expect(try contents() == [])
    }

    @Test func anImportThatIsCancelledLeavesNothing() async throws {
        let folder = DocumentsFolder(documents: documents)
        let opened = try folder.openModel(at: source)
        let hidden = documents
        await #expect(throws: CancellationError.self) {
            _ = try await folder.importModel(opened, at: source) { _ in
                #expect((try? FileManager.default.contentsOfDirectory(atPath: hidden.path).count) == 1)
                withUnsafeCurrentTask { $0?.cancel() }
            }
        }
        #expect(try contents() == [])
    }

    /// Imports of the current launch may still be in progress, so only folders of earlier launches are deleted.
    @Test func whatAnEndedImportLeftIsDeletedAtTheNextStart() async throws {
        let folder = DocumentsFolder(documents: documents)
        for name in [".importing-ended", ".importing-\(folder.launch)-begun", ".downloading-a--b"] {
            try documents.appendingPathComponent(name).appendingPathComponent("a.mesp").makeFolder()
        }
        await AppModel(monitor: monitor, folder: folder) { _ in ByteTokenizer() }.refresh()
        #expect(try contents().sorted() == [".downloading-a--b", ".importing-\(folder.launch)-begun"])
        await makeModel(freeBytes: nil).refresh()
        #expect(try contents() == [".downloading-a--b"])
    }

    @Test func oneModelIsRewrittenAtATime() async throws {
        final class Count: @unchecked Sendable {
            private let lock = NSLock()
            private(set) var most = 0
            private var now = 0
            func change(_ by: Int) { lock.withLock { (now, most) = (now + by, max(most, now + by)) } }
        }
        let (serial, count) = (SerialWork(), Count())
        try await withThrowingTaskGroup(of: Void.self) { group in
            for _ in 0..<3 {
                group.addTask {
                    try await serial.run {
                        count.change(1)
                        Thread.sleep(forTimeInterval: 0.02)
                        count.change(-1)
                    }
                }
            }
            try await group.waitForAll()
        }
        #expect(count.most == 1)
        let gate = DispatchSemaphore(value: 0)
        let (begins, begin) = AsyncStream.makeStream(of: Void.self)
        let first = Task {
            try await serial.run {
                begin.yield()
                gate.wait()
            }
        }
        for await _ in begins { break }
        let second = Task { try await serial.run { Issue.record("it was cancelled") } }
        second.cancel()
        await #expect(throws: CancellationError.self) { try await second.value }
        gate.signal()
        try await first.value
    }
}
