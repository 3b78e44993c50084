import Foundation
import MeSP
import MeSPControl
import Testing

@Suite(.serialized) @MainActor final class ExampleTests {
    private let folder = newFolder()

    private var adapters: URL { folder.appendingPathComponent("adapters") }
    private let conversations = Array(repeating: Conversation([.user("Hi"), .assistant("Good day")]), count: 4)

    private func tuner() async throws -> FineTuner {
        try await FineTuner(
            bundle: tiedBundle(), tokenizer: ByteTokenizer(), folder: folder.appendingPathComponent("tuner"),
            controller: RunController(monitor: TestMonitor()))
    }

    private func training(steps: Int) -> TrainingOptions {
        var options = TrainingOptions(steps: steps, sequenceLength: 32)
        options.batchSize = 2
        return options
    }

    private func until(_ condition: () -> Bool) async throws {
        while !condition() { try await Task.sleep(for: .milliseconds(5)) }
    }

    private func weights() throws -> Data {
        try Data(contentsOf: adapters.appendingPathComponent("adapters.safetensors"))
    }

    @Test func theLessonsAreRecordsOfAFile() throws {
        let encoder = JSONEncoder()
        let lines = try lessons().map { try encoder.encode($0) }
        let file = folder.appendingPathComponent("lessons.jsonl")
        try Data(lines.joined(separator: Data("\n".utf8))).write(to: file)
        let read = try Conversation.read(contentsOf: file)
        #expect(read.map(\.messages) == lessons().map(\.messages))
        #expect(read.map(\.tools.count) == [0, 1])
    }

    @Test func theSummaryIsOfAnswers() async throws {
        let (trained, notices) = try await summary(of: conversations, for: tuner())
        #expect(trained.hasPrefix("Good day") && notices.count == 1)
    }

    @Test func theLearnerLearnsAndTheAnswersShowIt() async throws {
        let tuner = try await tuner()
        let learner = Learner(tuner, adapters: adapters)
        learner.start(conversations, training(steps: 60))
        #expect(learner.isTraining && !learner.canContinue)
        try await until { !learner.isTraining }
        #expect(learner.problem == nil && learner.update?.fraction == 1 && !learner.canContinue)
        #expect(try !weights().isEmpty)
        let (learned, before) = try await answers(to: "Hi", tuner: tuner)
        #expect(learned.hasPrefix("Good day") && !before.hasPrefix("Good day"))
    }

    @Test func aLearnerIsTestedWithoutAModel() async throws {
        let updates = [TrainingUpdate(steps: 2, phase: .preparing), TrainingUpdate(steps: 2, pause: .heat)]
        let error = FineTuningError(.insufficientDisk(required: 10), "The disk is full.")
        let learner = Learner(GivenRun(updates, error: error, canContinue: true), adapters: adapters)
        learner.start([])
        try await until { !learner.isTraining }
        #expect(learner.problem == "The disk is full." && learner.update == updates.last && learner.canContinue)
        learner.resume()
        try await until { !learner.isTraining }
        #expect(learner.problem == "The disk is full." && error.kind == .insufficientDisk(required: 10))
    }

    @Test func theLearnerStopsAndGoesOn() async throws {
        let learner = Learner(try await tuner(), adapters: adapters)
        learner.start(conversations, training(steps: 12))
        try await until { !learner.isTraining }
        let whole = try weights()
        learner.start(conversations, training(steps: 12))
        try await until { (learner.update?.step ?? 0) >= 3 }
        learner.stop()
        try await until { !learner.isTraining }
        #expect(learner.problem == nil && learner.canContinue)
        #expect(try weights() != whole)
        // A new object simulates a new process.
        let other = Learner(try await tuner(), adapters: adapters)
        await other.refresh()
        #expect(other.canContinue)
        other.resume()
        try await until { !other.isTraining }
        #expect(other.update?.fraction == 1)
        #expect(try weights() == whole)
    }

    @Test func theLearnerSaysWhatIsWrong() async throws {
        let learner = Learner(try await tuner(), adapters: adapters)
        learner.start([conversations[0]], training(steps: 1))
        try await until { !learner.isTraining }
        #expect(learner.problem?.contains("too few to train on and hold out one") == true)
        #expect(!adapters.exists)
    }

    @Test func theAppAnswersBesideARun() async throws {
        let tuner = try await tuner()
        let learner = Learner(tuner, adapters: adapters)
        learner.start(conversations, training(steps: 1_000_000))
        try await until { (learner.update?.step ?? 0) >= 2 }
        let said = try await answer("Hi", beside: tuner) { prompt in
            AsyncThrowingStream { stream in
                for piece in [prompt, ", ", "you"] { stream.yield(piece) }
                stream.finish()
            }
        }
        #expect(said == "Hi, you")
        let step = try #require(learner.update).step
        try await until { (learner.update?.step ?? 0) > step }
        learner.stop()
        try await until { !learner.isTraining }
    }

    @Test func theOptionsKeepWithinTheMemory() async throws {
        let tuner = try await tuner()
        let found = try #require(options(for: tuner, megabytes: [1, 200, 500]))
        #expect(found.options.memory == .megabytes(500) && found.peak > 1_000_000 && found.peak < 500_000_000)
        #expect(options(for: tuner, megabytes: [1]) == nil)
    }

    @Test func whatPeopleTakeIsLearned() async throws {
        let tuner = try await tuner()
        let file = ChoiceFile(url: folder.appendingPathComponent("choices.jsonl"))
        for (index, word) in ["one", "two", "three", "four"].enumerated() {
            let hasLearned = try await learn(
                from: "\(word) is", over: "not \(word)", after: word, with: file, tuner: tuner, enough: 4,
                training(steps: 20))
            #expect(hasLearned == (index == 3))
        }
        #expect(try file.choices().map(\.chosen) == ["one is", "two is", "three is", "four is"])
        let log = try LogSummary(folder: folder.appendingPathComponent("tuner/run-1"))
        #expect(log.steps.last?.accuracy == 1, "the chosen answer is the likelier one")
        #expect(try abs(#require(log.steps.first).loss - 0.6931) < 1e-3, "ln 2")
    }
}
