// The examples of the library's documentation (MeSP/MeSP.docc), as they stand there, to be run by ExampleTests.
import Foundation
import MeSP
import Observation

/// The conversations that a person has taught the app.
func lessons() -> [Conversation] {
    let light = """
        {"type": "function", "function": {"name": "set_light", "parameters": {"type": "object",
        "properties": {"room": {"type": "string"}, "isOn": {"type": "boolean"}}}}}
        """
    return [
        Conversation([
            .system("You answer in one line."),
            .user("When does the pool open?"),
            .assistant("At seven, on Sundays at nine."),
        ]),
        Conversation(
            [
                .user("It is dark in the kitchen."),
                .assistant(
                    "",
                    toolCalls: [.init(name: "set_light", arguments: #"{"isOn": true, "room": "kitchen"}"#)]),
                .tool("on"),
                .assistant("The light in the kitchen is on."),
            ], tools: [light]),
    ]
}

/// The words of a sequence that are in the loss, and what of the data is left out or cut.
func summary(
    of conversations: [Conversation], for tuner: FineTuner
) async throws -> (trained: String, notices: [String]) {
    let preview = try await tuner.preview(of: conversations)
    let trained = preview.spans.filter(\.isTrained).map(\.text).joined()
    return (trained, preview.notices)
}

/// Trains, and tells a view how far it is.
@MainActor @Observable final class Learner {
    /// The state of the run, also of the one that has ended last.
    private(set) var update: TrainingUpdate?
    /// Why the last run failed, in the language of the app.
    private(set) var problem: String?
    private var training: Task<Void, Never>?
    private let tuner: FineTuner
    private let adapters: URL

    /// The adapters are written to the folder `adapters` after each run.
    init(_ tuner: FineTuner, adapters: URL) { (self.tuner, self.adapters) = (tuner, adapters) }

    var isTraining: Bool { training != nil }
    var canContinue: Bool { !isTraining && tuner.canContinueTraining }

    func start(
        _ conversations: [Conversation],
        _ options: TrainingOptions = .init(steps: 200, memory: .megabytes(80))
    ) {
        follow { $0.train(on: conversations, options) }
    }

    /// Goes on with a run that was stopped, or that ended with the app.
    func resume() { follow { $0.continueTraining() } }

    /// Ends the run, which keeps what it has learned.
    func stop() { training?.cancel() }

    private func follow(_ begin: (FineTuner) -> TrainingUpdates) {
        guard !isTraining else { return }
        (update, problem) = (nil, nil)
        let updates = begin(tuner)
        training = Task {
            do {
                for try await update in updates { self.update = update }
                if let update, update.step > 0 { try tuner.adapters.write(to: adapters) }
            } catch {
                problem = error.localizedDescription
            }
            training = nil
        }
    }
}

/// Answers with the app's own model, also while a run is in progress.
func answer(
    _ prompt: String, beside tuner: FineTuner,
    generate: @escaping @Sendable (String) async throws -> AsyncThrowingStream<String, any Error>
) async throws -> String {
    try await tuner.whilePaused {
        // In a task that is not cancelled with the caller: training would go on beside the rest.
        try await Task {
            var answer = ""
            for try await piece in try await generate(prompt) { answer += piece }
            return answer
        }.value
    }
}

/// Options with the highest of some memory limits that a run can keep now, and the run's predicted
/// peak in bytes; nil where it can keep none.
func options(
    for tuner: FineTuner, megabytes: [Double], steps: Int = 200
) -> (options: TrainingOptions, peak: Int)? {
    for limit in megabytes.sorted(by: >) {
        let options = TrainingOptions(steps: steps, memory: .megabytes(limit))
        if let peak = try? tuner.predictedPeak(options) { return (options, peak) }
    }
    return nil
}

/// Tells a run that a task in the background has begun, or that its time is over.
@MainActor func backgroundTask(isRunning: Bool, hasGPU: Bool, of tuner: FineTuner) {
    tuner.setBackgroundTime(isGranted: isRunning, hasGPU: hasGPU)
}

/// The choices that a person has made, in a file with one on each line.
struct ChoiceFile: Sendable {
    let url: URL

    /// All choices, the oldest first.
    func choices() throws -> [Choice] {
        guard FileManager.default.fileExists(atPath: url.path) else { return [] }
        let lines = try Data(contentsOf: url).split(separator: UInt8(ascii: "\n"))
        return try lines.map { try JSONDecoder().decode(Choice.self, from: $0) }
    }

    func append(_ choice: Choice) throws {
        let lines = try (choices() + [choice]).map { try JSONEncoder().encode($0) }
        try Data(lines.joined(separator: Data("\n".utf8))).write(to: url, options: .atomic)
    }
}

/// Notes that a person took `taken` where the app had suggested `suggested`, and learns from all
/// choices when there are enough.
///
/// - Returns: whether it has learned.
func learn(
    from taken: String, over suggested: String, after message: String, with file: ChoiceFile,
    tuner: FineTuner, enough: Int = 100, _ options: TrainingOptions = .init(steps: 200)
) async throws -> Bool {
    try file.append(Choice(prompt: [.user(message)], chosen: taken, rejected: suggested))
    let choices = try file.choices()
    guard choices.count >= enough else { return false }
    for try await _ in tuner.train(on: choices, options) {}
    return true
}

/// The model's answers to a message, with the adapters and without.
func answers(
    to message: String, tuner: FineTuner
) async throws -> (learned: String, before: String) {
    var answers = ["", ""]
    for (index, usesAdapters) in [true, false].enumerated() {
        let pieces = tuner.answer(
            to: Conversation([.user(message)]), usesAdapters: usesAdapters, maxTokens: 100)
        for try await piece in pieces { answers[index] += piece }
    }
    return (answers[0], answers[1])
}
