import MeSPAppModel
import SwiftUI

struct TryView: View {
    @Environment(AppModel.self) private var model
    @Environment(\.dynamicTypeSize) private var textSize
    @Environment(\.horizontalSizeClass) private var width
    @State private var correction: Correction?
    @FocusState private var isTyping: Bool

    private var chat: SideBySideChat { model.chat }
    private var trained: [StoredRun] { model.library.trained }
    private var request: SideBySideChat.Request { chat.draft }

    var body: some View {
        @Bindable var model = model
        @Bindable var chat = model.chat
        NavigationStack {
            Form {
                ForEach(chat.turns) { turn in
                    Section {
                        Text(turn.prompt).font(.callout).textSelection(.enabled)
                        answers(turn, writing: turn.id == chat.turns.last?.id ? chat.writing : nil)
                    }
                }
                Section("Prompt") {
                    TextField(
                        request.isChat ? "Say something" : "Text to continue", text: $chat.draft.prompt,
                        axis: .vertical
                    )
                    .lineLimit(2...6)
                    .focused($isTyping)
                    .accessibilityLabel("Prompt")
                    .accessibilityIdentifier("prompt")
                    Toggle("As a message to the model", isOn: $chat.draft.isChat)
                    if chat.writing == nil {
                        Button("Write", systemImage: "play.fill") { write() }
                            .disabled(request.prompt.isEmpty || !model.isFree)
                    } else {
                        Button("Stop", systemImage: "stop.fill", role: .destructive) { chat.stop() }
                    }
                    if let problem = chat.problem { ProblemLabel(problem.localized) }
                    if model.controller.isRunning {
                        Text("A run is in progress. Writing is possible when it has ended.")
                    }
                }
                Section("Writing models") {
                    if let bundle = model.writingBundle { LabeledContent("Model", value: bundle.name) }
                    if trained.isEmpty, model.library.hasLooked {
                        Text("Train a run first; until then only the base model writes.").foregroundStyle(.secondary)
                    } else if !trained.isEmpty {
                        Picker("Fine-tuned by", selection: $model.chosenRun) {
                            Text("The latest").tag(StoredRun.ID?.none)
                            ForEach(trained) { Text($0.name).tag(Optional($0.id)) }
                        }
                        if !model.secondRuns.isEmpty {
                            Picker("Together with", selection: $model.secondRun) {
                                Text("None").tag(StoredRun.ID?.none)
                                ForEach(model.secondRuns) { Text($0.name).tag(Optional($0.id)) }
                            }
                        }
                        ForEach(Array(model.writingRuns.enumerated()), id: \.element.id) { index, run in
                            slider("Strength of \(run.name)", $model.strengths[index], in: 0...1)
                        }
                    }
                }
                Section {
                    DisclosureGroup("More") {
                        if request.isChat {
                            TextField("Instructions to the model", text: $chat.draft.system, axis: .vertical)
                                .lineLimit(1...6)
                                .accessibilityLabel("System prompt")
                        }
                        Stepper(
                            "\(request.maxTokens) tokens", value: $chat.draft.maxTokens, in: 16...512, step: 16)
                        slider("Temperature", $chat.draft.temperature, in: 0...1.5)
                        slider("Top-p", $chat.draft.topP, in: 0.05...1)
                    }
                }
            }
            .sheet(item: $correction) { CorrectionView(correction: $0) }
            .navigationTitle("Try It")
            .scrollDismissesKeyboard(.interactively)
            .doneKey { isTyping = false }
            .toolbar {
                Button("New Conversation", systemImage: "square.and.pencil") { model.askToDelete(.conversation) }
                    .disabled(chat.turns.isEmpty || chat.writing != nil)
            }
        }
    }

    private func write() {
        let wanted = request
        isTyping = false
        if wanted.isChat { chat.draft.prompt = "" }
        Task { await model.write(wanted) }
    }

    private func slider(
        _ title: LocalizedStringKey, _ value: Binding<Float>, in range: ClosedRange<Float>
    ) -> some View {
        LabeledContent(title) {
            Slider(value: value, in: range)
                .accessibilityLabel(title)
                .accessibilityValue(value.wrappedValue.formatted(.number.precision(.fractionLength(2))))
        }
    }

    private func answers(_ turn: SideBySideChat.Turn, writing: SideBySideChat.Side?) -> some View {
        let layout =
            textSize.isAccessibilitySize || width == .compact
            ? AnyLayout(VStackLayout(alignment: .leading, spacing: 16))
            : AnyLayout(HStackLayout(alignment: .top, spacing: 16))
        return layout {
            VStack(alignment: .leading) {
                WrittenText(
                    title: "Base model", name: chat.bundleName, text: turn.base, isWriting: writing == .base)
                choiceButtons(.base, turn.base.text, of: turn)
            }
            if let runs = chat.tunedName(of: turn) {
                Divider()
                VStack(alignment: .leading) {
                    WrittenText(title: "Fine-tuned", name: runs, text: turn.tuned, isWriting: writing == .tuned)
                    choiceButtons(.tuned, turn.tuned.text, of: turn)
                }
            }
        }
    }

    @ViewBuilder private func choiceButtons(_ side: SideBySideChat.Side, _ answer: String, of turn: SideBySideChat.Turn)
        -> some View
    {
        if chat.isConversation, chat.writing == nil, !answer.isEmpty {
            let isTaken = model.choices.contains(answer, to: turn.prompt)
            HStack {
                Button("Better", systemImage: isTaken ? "hand.thumbsup.fill" : "hand.thumbsup") {
                    Task { await model.choose(side, of: turn.id) }
                }
                .disabled(turn.base.text.isEmpty || turn.tuned.text.isEmpty)
                Button("Correct", systemImage: "pencil") {
                    correction = Correction(side: side, turn: turn.id, text: answer)
                }
            }
            .labelStyle(.iconOnly)
            .buttonStyle(.borderless)
        }
    }
}

private struct Correction: Identifiable {
    let side: SideBySideChat.Side
    let turn: SideBySideChat.Turn.ID
    let text: String
    var id: SideBySideChat.Turn.ID { turn }
}

private struct CorrectionView: View {
    @Environment(AppModel.self) private var model
    @Environment(\.dismiss) private var dismiss
    let correction: Correction
    @State private var text = ""

    var body: some View {
        NavigationStack {
            Form {
                Section("What it should have said") {
                    TextEditor(text: $text).frame(minHeight: 160).accessibilityLabel("The corrected answer")
                }
            }
            .toolbar {
                ToolbarItem(placement: .cancellationAction) { Button("Cancel") { dismiss() } }
                ToolbarItem(placement: .confirmationAction) {
                    Button("Keep") {
                        Task { await model.choose(correction.side, of: correction.turn, corrected: text) }
                        dismiss()
                    }
                }
            }
            .onAppear { text = correction.text }
        }
    }
}

private struct WrittenText: View {
    let title: LocalizedStringKey
    let name: String
    let text: SideBySideChat.Text
    let isWriting: Bool

    var body: some View {
        VStack(alignment: .leading, spacing: 8) {
            HStack {
                Text(title).font(.headline)
                if isWriting { ProgressView() }
            }
            Text(name).font(.caption).foregroundStyle(.secondary)
            Text(text.text).font(.callout).textSelection(.enabled)
            if let summary = text.summary, summary.seconds > 0 {
                Text(
                    "\((Double(summary.tokens) / summary.seconds).formatted(.number.precision(.fractionLength(1)))) tokens per second"
                )
                .font(.caption).foregroundStyle(.secondary)
            }
        }
        .frame(maxWidth: .infinity, alignment: .leading)
    }
}
