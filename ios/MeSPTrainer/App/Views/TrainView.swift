import MeSPAppModel
import SwiftUI
import UniformTypeIdentifiers

struct TrainView: View {
    @Environment(AppModel.self) private var model

    var body: some View {
        NavigationStack {
            if model.showsSetup {
                SetupView()
            } else {
                RunView()
            }
        }
    }
}

private struct InterruptedSection: View {
    @Environment(AppModel.self) private var model
    let run: StoredRun

    var body: some View {
        Section("The app ended during this run") {
            LabeledContent("\(run.name)", value: String(localized: "step \(run.log?.lastStep ?? 0)"))
            Button("Resume from the Last Saved State", systemImage: "play.fill") {
                Task { await model.resume(run) }
            }
            .disabled(!model.isFree)
            Button("Not Now", systemImage: "xmark") { model.decline(run) }
        }
    }
}

struct SetupView: View {
    @Environment(AppModel.self) private var model

    var body: some View {
        Form {
            if let refusal = model.refusal {
                Section {
                    Label(refusal.localized, systemImage: "iphone.slash")
                    Button("Show a Recorded Run", systemImage: "play.rectangle") { Task { await model.replay() } }
                        .disabled(!model.canReplay)
                }
            }
            if let run = model.interrupted { InterruptedSection(run: run) }
            Section {
                if let lesson = model.form.lesson {
                    Text(lesson.localized).font(.headline)
                } else if !model.library.hasLooked {
                    ProgressView("Looking for models")
                }
                NavigationLink("More") { MoreView() }
            } footer: {
                Text("Training happens on this device. Your text does not leave it.")
            }
            if let problem = model.preview.problem { Section { ProblemLabel(problem.localized) } }
            if let preview = model.preview.current { PreviewSection(preview: preview) }
        }
        .task(id: model.preview.inputs) { await model.updatePreview() }
        .navigationTitle("New Run")
        .startBar()
        .toolbar {
            if model.controller.isRunning { Button("Show Run") { model.showsSetup = false } }
        }
    }
}

private struct PreviewSection: View {
    let preview: TrainingPreview

    var body: some View {
        Section {
            preview.spans.reduce(Text(verbatim: "")) { $0 + shown($1) }
                .font(.callout)
                .accessibilityLabel(preview.spoken.map(\.localized).joined(separator: " "))
            NoticeRows(notices: preview.notices)
        } header: {
            Text("Trained first")
        } footer: {
            Text("Bold text is learned. The rest is only read. Special tokens are in italics.")
        }
    }

    private func shown(_ run: TrainingPreview.Span) -> Text {
        let text = run.isSpecial ? Text(verbatim: run.text).italic() : Text(verbatim: run.text)
        return run.isTrained ? text.bold() : text.foregroundStyle(.secondary)
    }
}

extension View {
    fileprivate func startBar() -> some View { safeAreaInset(edge: .bottom) { StartBar() } }
}

private struct StartBar: View {
    @Environment(AppModel.self) private var model

    var body: some View {
        VStack(spacing: 8) {
            if let problem = model.startProblem { ProblemLabel(problem.localized).font(.footnote) }
            if let part = model.tokenized {
                ProgressView("Tokenizing the text", value: part)
            } else if model.isPreparing {
                ProgressView("Preparing")
            } else {
                Button {
                    Task { await model.startTraining() }
                } label: {
                    Label("Start", systemImage: "play.fill").frame(maxWidth: .infinity)
                }
                .buttonStyle(.borderedProminent)
                .controlSize(.large)
                .disabled(!model.canStart)
            }
        }
        .padding()
        .background(.bar)
    }
}

private struct MoreView: View {
    private enum Field: Hashable {
        case number(NumberField)
        case pasted
    }

    @Environment(AppModel.self) private var model
    @Environment(\.dismiss) private var dismiss
    @State private var choosesFile = false
    @FocusState private var field: Field?

    var body: some View {
        @Bindable var form = model.form
        @Bindable var screen = model.screen
        Form {
            textSection
            modelSection
            Section {
                Picker("Length in", selection: $form.countsEpochs) {
                    Text("Steps").tag(false)
                    Text("Epochs").tag(true)
                }
                if form.countsEpochs { number("Epochs", .epochs) } else { number("Steps", .steps) }
                Picker("Gradients", selection: $form.settings.method) {
                    ForEach(GradientMethod.allCases, id: \.self) { Text($0.name).tag($0) }
                }
                Picker("Optimizer", selection: $form.optimizer) {
                    Text("SGD").tag(RunSettings.OptimizerKind.sgd)
                    Text("AdamW").tag(RunSettings.OptimizerKind.adamw8bit)
                    Text("AdamW, 32 bits").tag(RunSettings.OptimizerKind.adamw)
                }
                number("Learning rate", .learningRate)
            } header: {
                Text("Method")
            } footer: {
                Text(
                    "AdamW learns faster. SGD takes less memory and needs a learning rate about a hundred times higher."
                )
            }
            settingsSection
            memorySection
            Section {
                Toggle("Keep the screen on", isOn: $screen.keepsAwake)
            } footer: {
                Text(
                    "A run on the GPU waits while the app is in the background or the phone is locked, and continues when you return. A run on the CPU continues while iOS grants it time: for a while after you leave the app (iOS 26), and at night on the charger."
                )
            }
            Section { NavigationLink("Train with Others") { FederationView() } }
        }
        .navigationTitle("More")
        .inlineTitle()
        .scrollDismissesKeyboard(.interactively)
        .doneKey { field = nil }
        .startBar()
        .onChange(of: model.showsSetup) { if !model.showsSetup { dismiss() } }
        .fileImporter(isPresented: $choosesFile, allowedContentTypes: [.plainText, .json, .data]) { result in
            switch result {
            case .success(let url): Task { await url.accessed { await model.chooseText(at: url) } }
            case .failure(let error): model.problem = "\(error.localizedDescription)"
            }
        }
    }

    @ViewBuilder private var modelSection: some View {
        @Bindable var form = model.form
        Section("Model") {
            Picker("Bundle", selection: $form.bundleID) {
                ForEach(model.library.usableBundles) { Text($0.name).tag(Optional($0.id)) }
            }
            if let manifest = model.form.bundle?.manifest {
                Picker("Tokens in a sequence", selection: $form.settings.seqLen) {
                    ForEach(manifest.seqLens, id: \.self) { Text($0.formatted()).tag($0) }
                }
                Picker("Rank", selection: $form.settings.rank) {
                    ForEach(manifest.ranks, id: \.self) { Text($0.formatted()).tag($0) }
                }
                Picker("Processor", selection: $form.settings.device) {
                    Text("Automatic").tag(Backend?.none)
                    Text("GPU").tag(Backend?.some(.gpu))
                    Text("CPU").tag(Backend?.some(.cpu))
                }
            }
        }
    }

    @ViewBuilder private var textSection: some View {
        @Bindable var form = model.form
        Section("Text") {
            Picker("Train on", selection: $form.textKind) {
                Text("The bundle’s text").tag(TrainingForm.TextKind.bundle)
                Text("A file").tag(TrainingForm.TextKind.file)
                Text("Pasted text").tag(TrainingForm.TextKind.pasted)
                Text("My choices").tag(TrainingForm.TextKind.choices)
            }
            .accessibilityIdentifier("train-on")
            switch model.form.textKind {
            case .bundle: EmptyView()
            case .file:
                if let file = model.form.file { LabeledContent("File", value: file.lastPathComponent) }
                Button("Choose a File", systemImage: "doc") { choosesFile = true }
                Toggle("Learn only from answers", isOn: $form.answersOnly)
            case .pasted:
                TextEditor(text: $form.pasted)
                    .frame(minHeight: 120)
                    .focused($field, equals: .pasted)
                    .accessibilityLabel("Text to train on")
            case .choices:
                if model.choices.list.isEmpty {
                    Text("Under Try It, choose the better of two answers, or correct an answer.")
                        .foregroundStyle(.secondary)
                } else {
                    NavigationLink("Choices: \(model.choices.list.count)") { ChoicesView() }
                    ShareLink("Share Them", item: model.choices.url)
                }
            }
        }
    }

    @ViewBuilder private var settingsSection: some View {
        @Bindable var form = model.form
        Section("Settings") {
            Picker("Learning rate schedule", selection: $form.settings.schedule) {
                Text("Constant").tag(RunSettings.Schedule.constant)
                Text("Linear decay").tag(RunSettings.Schedule.linear)
                Text("Cosine decay").tag(RunSettings.Schedule.cosine)
            }
            number("Steps of warm-up", .warmup)
            number("Sequences in a batch", .batchSize)
            number("Batches in a step", .accumulation)
            Toggle("Clip the gradient", isOn: $form.clips)
            if model.form.clips { number("Largest gradient norm", .clipping) }
            ForEach(model.form.projections, id: \.self) { name in
                Toggle("Train \(name)", isOn: $form[trains: name])
            }
            Toggle("Keep what the model knows", isOn: $form.keepsKnowledge)
            Picker("Start from the adapters of", selection: $form.startingRun) {
                Text("No run").tag(StoredRun.ID?.none)
                ForEach(model.form.startingRuns) { Text($0.name).tag(Optional($0.id)) }
            }
        }
    }

    @ViewBuilder private var memorySection: some View {
        @Bindable var form = model.form
        Section("Memory") {
            Toggle("Stay below a limit", isOn: $form.hasLimit)
            if model.form.hasLimit {
                number("Limit in MB", .limit)
            }
            if let fit = try? model.form.fit.get() {
                LabeledContent("Predicted peak", value: fit.predictedPeak.bytes)
                if let available = fit.available { LabeledContent("Free for the app", value: available.bytes) }
                if fit.fits {
                    TintedLabel(
                        String(localized: "Fits this phone"), systemImage: "checkmark.circle.fill", tint: .green)
                }
            }
        }
    }

    private func number(_ title: LocalizedStringKey, _ number: NumberField) -> some View {
        @Bindable var form = model.form
        return LabeledContent(title) {
            TextField(title, text: $form[text: number])
                .multilineTextAlignment(.trailing)
                .numberPad()
                .focused($field, equals: .number(number))
        }
    }
}
