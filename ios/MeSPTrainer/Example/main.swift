// tutor BUNDLE FOLDER: an example of a terminal app that uses MeSP. Of this package, it imports only the module MeSP.

import Foundation
import MeSP

let (bundle, folder) = (URL(fileURLWithPath: CommandLine.arguments[1]), URL(fileURLWithPath: CommandLine.arguments[2]))
let tool = #"{"type": "function", "function": {"name": "set", "parameters": {"type": "object"}}}"#
let call = Conversation.ToolCall(name: "set", arguments: #"{"lamp": true}"#)
let withTool = Conversation(
    [.user("It is dark in the den."), .assistant("", toolCalls: [call]), .tool("on"), .assistant("Done.")],
    tools: [tool])
let rooms = ["hall", "attic", "den", "loft", "bath", "porch"].flatMap { room in
    ["lamp", "fan", "radio", "heater", "blind"].map { thing in
        Conversation([.user("\(thing) on in the \(room)"), .assistant("\(room): \(thing) = on")])
    }
}
let conversations = [withTool] + rooms

func line(_ update: TrainingUpdate) -> String {
    func number(_ loss: Float?) -> String { loss.map { String(format: "%.3f", $0) } ?? "-" }
    return "step \(update.step)/\(update.steps), loss \(number(update.loss)), held-out \(number(update.heldOutLoss)), "
        + "\(update.peakFootprint / 1_000_000) MB" + (update.timeRemaining.map { ", \($0.formatted()) left" } ?? "")
        + (update.pause.map { ", waits: \($0.message)" } ?? "") + update.notices.map { "\n  \($0)" }.joined()
}

func ask(_ question: String, of tuner: FineTuner) async throws {
    for usesAdapters in [true, false] {
        var answer = ""
        for try await piece in tuner.answer(
            to: Conversation([.user(question)]), usesAdapters: usesAdapters, maxTokens: 20)
        { answer += piece }
        print(usesAdapters ? "with adapters:" : "without:", answer.debugDescription)
    }
}

do {
    let tuner = try await FineTuner(
        bundle: bundle, tokenizer: Bytes(), folder: folder.appendingPathComponent("runs"))
    let options = TrainingOptions(steps: 30, memory: .megabytes(40), sequenceLength: 256)

    print("== What is trained of the first")
    let preview = try await tuner.preview(of: conversations, options)
    print(preview.spans.map { $0.isTrained ? "[\($0.text)]" : $0.text }.joined())
    print("predicted: \(try tuner.predictedPeak(options) / 1_000_000) MB")

    print("== Cancelled after step 10")
    let updates = tuner.train(on: conversations, options)
    let (steps, report) = AsyncStream.makeStream(of: Int.self)
    let training = Task {
        defer { report.finish() }
        for try await update in updates {
            print(line(update))
            report.yield(update.step)
        }
    }
    for await step in steps where step >= 10 { break }
    training.cancel()
    try await training.value
    try tuner.adapters.write(to: folder.appendingPathComponent("half"))

    print("== To the end, with a pause")
    var isOwnWorkDone = false
    for try await update in tuner.continueTraining() {
        print(line(update))
        guard update.step == 15, !isOwnWorkDone else { continue }
        isOwnWorkDone = true  // the pause is an update too
        await tuner.whilePaused { print("the app's own work") }
    }
    try tuner.adapters.write(to: folder.appendingPathComponent("adapters"))
    try await ask("lamp on in the hall", of: tuner)

    print("== Choices")
    let choices = try (1...12).map {
        try Choice(prompt: [.user("Number \($0)?")], chosen: "\($0), sir.", rejected: "It is \($0)")
    }
    var more = TrainingOptions(steps: 12, memory: .megabytes(40), sequenceLength: 128)
    more.initialAdapters = folder.appendingPathComponent("adapters")
    for try await update in tuner.train(on: choices, more) { print(line(update)) }

    print("== A file of conversations")
    let file = folder.appendingPathComponent("conversations.jsonl")
    try Data(conversations.map { try JSONEncoder().encode($0) }.joined(separator: Data("\n".utf8))).write(to: file)
    print("\(try Conversation.read(contentsOf: file).count) conversations")
    for try await update in tuner.train(on: file, TrainingOptions(steps: 2)) { print(line(update)) }

    print("== An option that is refused")
    for try await _ in tuner.train(on: conversations, TrainingOptions(steps: 0)) {}
} catch {
    print(error.localizedDescription)
}
