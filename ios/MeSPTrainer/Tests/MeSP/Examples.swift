// These are the examples of the library's documentation (MeSP/MeSP.docc), except the views. ExampleTests runs them.
import Foundation
import MeSP
import Observation

/// Returns the conversations that a person has taught the app.
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

/// Returns the words of the first sequence that are trained, and the notices about the data.
func summary(
    of conversations: [Conversation], for tuner: FineTuner
) async throws -> (trained: String, notices: [String]) {
    let preview = try await tuner.preview(of: conversations)
    let trained = preview.spans.filter(\.isTrained).map(\.text).joined()
    return (trained, preview.notices)
}

/// What `Learner` uses of a fine-tuner. Tests and previews have another tuner, without a model.
protocol Tuner: AnyObject, Sendable {
    var canContinueTraining: Bool { get async }
    var adapters: Adapters { get throws }
    func train(on conversations: [Conversation], _ options: TrainingOptions) -> TrainingUpdates
    func continueTraining() -> TrainingUpdates
}

extension FineTuner: Tuner {}

/// A training run that a view observes.
@MainActor @Observable final class Learner {
    /// The latest update of the present or last run.
    private(set) var update: TrainingUpdate?
    /// The reason why the last run failed, in the app's language.
    private(set) var problem: String?
    /// Whether `resume` can continue a run.
    private(set) var canContinue = false
    private var training: Task<Void, Never>?
    private let tuner: any Tuner
    private let adapters: URL

    /// Creates a learner that writes the adapters to the folder `adapters` after a run.
    init(_ tuner: any Tuner, adapters: URL) { (self.tuner, self.adapters) = (tuner, adapters) }

    var isTraining: Bool { training != nil }

    func start(
        _ conversations: [Conversation],
        _ options: TrainingOptions = .init(steps: 200, memory: .megabytes(80))
    ) {
        follow { $0.train(on: conversations, options) }
    }

    /// Continues a run that was stopped, or that ended with the app.
    func resume() { follow { $0.continueTraining() } }

    /// Looks for a run to continue. Call it when a view appears.
    func refresh() async {
        if !isTraining { canContinue = await tuner.canContinueTraining }
    }

    /// Ends the run, which saves its adapters.
    func stop() { training?.cancel() }

    private func follow(_ begin: (any Tuner) -> TrainingUpdates) {
        guard !isTraining else { return }
        (update, problem, canContinue) = (nil, nil, false)
        let updates = begin(tuner)
        training = Task {
            do {
                for try await update in updates { self.update = update }
                if let update, update.step > 0 { try tuner.adapters.write(to: adapters) }
            } catch {
                problem = error.localizedDescription
            }
            canContinue = await tuner.canContinueTraining
            training = nil
        }
    }
}

/// A tuner for tests and previews, whose run has the given updates and error.
final class GivenRun: Tuner {
    let updates: [TrainingUpdate]
    let error: FineTuningError?
    let canContinueTraining: Bool
    let adapters = Adapters(url: .temporaryDirectory)

    init(_ updates: [TrainingUpdate], error: FineTuningError? = nil, canContinue: Bool = false) {
        (self.updates, self.error, canContinueTraining) = (updates, error, canContinue)
    }

    func train(on conversations: [Conversation], _ options: TrainingOptions) -> TrainingUpdates {
        TrainingUpdates(updates, throwing: error)
    }

    func continueTraining() -> TrainingUpdates { TrainingUpdates(updates, throwing: error) }
}

/// Answers with the app's own model, even while a run is in progress.
func answer(
    _ prompt: String, beside tuner: FineTuner,
    generate: @escaping @Sendable (String) async throws -> AsyncThrowingStream<String, any Error>
) async throws -> String {
    try await tuner.whilePaused {
        // A new task is not cancelled with the caller, so training waits until the end.
        try await Task {
            var answer = ""
            for try await piece in try await generate(prompt) { answer += piece }
            return answer
        }.value
    }
}

/// Returns options with the highest memory limit that a run can keep now, and the predicted peak
/// in bytes; nil if it can keep none.
func options(
    for tuner: FineTuner, megabytes: [Double], steps: Int = 200
) -> (options: TrainingOptions, peak: Int)? {
    for limit in megabytes.sorted(by: >) {
        let options = TrainingOptions(steps: steps, memory: .megabytes(limit))
        if let peak = try? tuner.predictedPeak(options) { return (options, peak) }
    }
    return nil
}

/// The choices that a person has made, in a file with one choice on each line.
struct ChoiceFile: Sendable {
    let url: URL

    /// Returns all choices, the oldest first.
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

/// Saves the choice of `taken` over the app's suggestion `suggested`, and trains on all choices
/// when there are enough.
///
/// - Returns: whether it has trained.
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

/// Returns the model's answers to a message, with and without the adapters.
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

/// A model that adapters can be loaded into.
@MainActor protocol AdaptableModel {
    /// Loads a folder of adapters in place of those that are loaded; nil unloads them.
    func use(_ adapters: URL?) async throws
    func answer(to prompt: String) async throws -> String
}

/// Learns in front and in the background, and uses what was learned.
@MainActor final class Personalization {
    private let tuner: FineTuner
    private let model: any AdaptableModel
    private let folder: URL
    private var loaded = 0
    private var isStopped = false

    /// - Parameter folder: the folder for the versions of the adapters: `1`, `2` and so on.
    init(_ tuner: FineTuner, of model: any AdaptableModel, folder: URL) {
        (self.tuner, self.model, self.folder) = (tuner, model, folder)
    }

    /// Continues the last run, or begins one.
    ///
    /// - Returns: whether the run is complete. It is not if `stop` has ended it.
    func learn(from conversations: [Conversation], _ options: TrainingOptions) async throws -> Bool {
        isStopped = false
        let continues = await tuner.canContinueTraining
        guard !isStopped else { return false }
        let updates = continues ? tuner.continueTraining() : tuner.train(on: conversations, options)
        for try await _ in updates {}
        try await keep()
        return await !tuner.canContinueTraining
    }

    /// Learns while a background task runs.
    func learn(
        from conversations: [Conversation], _ options: TrainingOptions, during time: GrantedTime
    ) async throws -> Bool {
        tuner.setBackgroundTime(time)
        defer { tuner.setBackgroundTime(nil) }
        return try await learn(from: conversations, options)
    }

    /// Ends the run, which can be continued later. Call it when a background task expires.
    func stop() async {
        isStopped = true
        await tuner.stop()
    }

    /// Loads the newest version. Call it when the app is in front, because loading uses the GPU.
    func refresh() async throws {
        try await keep()
        guard versions.contains(chosen), chosen != loaded else { return }
        try await use(chosen)
    }

    /// Loads the version before, or none. The app uses it until something new is learned.
    func rollBack() async throws {
        let before = versions.last { $0 < chosen } ?? 0
        try await use(before)
        try choose(before)
    }

    /// Returns the model's answer. A run waits meanwhile.
    func answer(to prompt: String) async throws -> String {
        try await tuner.whilePaused {
            // A new task is not cancelled with the caller, so the run waits for the end.
            try await Task { try await model.answer(to: prompt) }.value
        }
    }

    private func use(_ version: Int) async throws {
        try await tuner.whilePaused { try await model.use(version > 0 ? place(version) : nil) }
        loaded = version
    }

    /// Copies the adapters of a complete run, also if the app ended before it could do so.
    private func keep() async throws {
        guard await !tuner.canContinueTraining, let learned = try? tuner.adapters else { return }
        let newest = versions.last ?? 0
        guard !FileManager.default.contentsEqual(atPath: matrices(learned.url), andPath: matrices(place(newest)))
        else { return }
        try choose(newest + 1)
        try learned.write(to: place(newest + 1))
    }

    /// The version to use; 0 for none.
    private var chosen: Int {
        (try? String(contentsOf: choice, encoding: .utf8)).flatMap { Int($0) } ?? 0
    }

    private func choose(_ version: Int) throws {
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        try "\(version)".write(to: choice, atomically: true, encoding: .utf8)
    }

    private var choice: URL { folder.appendingPathComponent("chosen") }

    private func matrices(_ adapters: URL) -> String {
        adapters.appendingPathComponent("adapters.safetensors").path
    }

    private func place(_ version: Int) -> URL { folder.appendingPathComponent("\(version)") }

    private var versions: [Int] {
        let names = (try? FileManager.default.contentsOfDirectory(atPath: folder.path)) ?? []
        return names.compactMap { Int($0) }.sorted()
    }
}
