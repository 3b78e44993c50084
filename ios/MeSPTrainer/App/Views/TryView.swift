import MeSPAppModel
import MeSPCore
import SwiftUI

/// One prompt, base against fine-tuned.
struct TryView: View {
    @Environment(AppModel.self) private var model
    @Environment(\.horizontalSizeClass) private var width
    @Environment(\.dynamicTypeSize) private var textSize
    @State private var request = Comparison.Request()
    @State private var runID: StoredRun.ID?

    private var comparison: Comparison { model.comparison }
    private var trained: [StoredRun] {
        model.library.runs.filter { $0.adapters != nil && model.library.bundle(of: $0) != nil }
    }
    private var run: StoredRun? { trained.first { $0.id == runID } ?? trained.first }

    var body: some View {
        NavigationStack {
            Form {
                Section("Prompt") {
                    TextField("Write on from here", text: $request.prompt, axis: .vertical)
                        .lineLimit(2...6)
                        .accessibilityLabel("Prompt")
                    Toggle("As a message to the model", isOn: $request.isChat)
                }
                Section("Adapters") {
                    if trained.isEmpty {
                        Text("Train a run first; until then only the base model writes.").foregroundStyle(.secondary)
                    } else {
                        Picker("Run", selection: $runID) {
                            Text("The latest").tag(StoredRun.ID?.none)
                            ForEach(trained) { Text($0.name).tag(Optional($0.id)) }
                        }
                    }
                    Stepper("\(request.maxTokens) tokens", value: $request.maxTokens, in: 16...512, step: 16)
                    LabeledContent("Temperature") {
                        Slider(value: $request.temperature, in: 0...1.5)
                            .accessibilityLabel("Temperature")
                            .accessibilityValue(request.temperature.formatted(.number.precision(.fractionLength(1))))
                    }
                }
                Section {
                    if comparison.writing == nil {
                        Button("Write", systemImage: "play.fill") { Task { await model.write(request, with: run) } }
                            .disabled(request.prompt.isEmpty || !model.isFree)
                    } else {
                        Button("Stop", systemImage: "stop.fill", role: .destructive) { comparison.stop() }
                    }
                    if let problem = comparison.problem {
                        Label(problem, systemImage: "exclamationmark.triangle.fill").foregroundStyle(.orange)
                    }
                } footer: {
                    if model.controller.isRunning { Text("A run is in progress: writing has to wait for its end.") }
                }
                Section {
                    // Side by side where there is room for two columns of this text.
                    let layout =
                        textSize.isAccessibilitySize
                        ? AnyLayout(VStackLayout(alignment: .leading, spacing: 16))
                        : AnyLayout(HStackLayout(alignment: .top, spacing: 16))
                    layout {
                        WrittenText(title: "Base", text: comparison.base, isWriting: comparison.writing == .base)
                        Divider()
                        WrittenText(
                            title: "Fine-tuned", text: comparison.tuned, isWriting: comparison.writing == .tuned)
                    }
                }
            }
            .navigationTitle("Try It")
            .scrollDismissesKeyboard(.interactively)
        }
    }
}

/// What one model has written so far.
private struct WrittenText: View {
    let title: LocalizedStringKey
    let text: Comparison.Text
    let isWriting: Bool

    var body: some View {
        VStack(alignment: .leading, spacing: 8) {
            HStack {
                Text(title).font(.headline)
                if isWriting { ProgressView() }
            }
            Text(text.text).font(.callout).textSelection(.enabled)
            if let summary = text.summary, summary.seconds > 0 {
                Text(
                    "\((Double(summary.tokens) / summary.seconds).formatted(.number.precision(.fractionLength(1)))) tokens a second"
                )
                .font(.caption).foregroundStyle(.secondary)
            }
        }
        .frame(maxWidth: .infinity, alignment: .leading)
    }
}
