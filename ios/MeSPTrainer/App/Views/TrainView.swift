import MeSPAppModel
import MeSPCore
import SwiftUI
import UniformTypeIdentifiers

/// The form for a run, or the run.
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

/// What to train, on what, and how; with the predicted peak before the start.
struct SetupView: View {
    @Environment(AppModel.self) private var model
    @State private var choosesFile = false

    var body: some View {
        @Bindable var form = model.form
        @Bindable var screen = model.screen
        Form {
            modelSection
            textSection
            Section {
                Picker("Gradients", selection: $form.settings.method) {
                    ForEach(GradientMethod.allCases, id: \.self) { Text($0.name).tag($0) }
                }
                Picker("Optimizer", selection: $form.settings.optimizer) {
                    Text("SGD").tag(RunSettings.OptimizerKind.sgd)
                    Text("AdamW").tag(RunSettings.OptimizerKind.adamw)
                }
                number("Learning rate") {
                    TextField(
                        "Learning rate", value: $form.settings.learningRate,
                        format: .number.precision(.significantDigits(1...4)))
                }
                number("Steps") { TextField("Steps", value: $form.settings.steps, format: .number) }
            } header: {
                Text("Method")
            } footer: {
                Text("AdamW learns faster. SGD takes less memory, and needs a rate some hundred times as high.")
            }
            memorySection
            Section {
                Toggle("Keep the screen on", isOn: $screen.keepsAwake)
            } footer: {
                Text(
                    "iOS stops the run while the app is not in front or the phone is locked. It goes on when you come back."
                )
            }
            startSection
        }
        .navigationTitle("New Run")
        .scrollDismissesKeyboard(.interactively)
        .fileImporter(isPresented: $choosesFile, allowedContentTypes: [.plainText, .json, .data]) { result in
            switch result {
            case .success(let url): choose(url)
            case .failure(let error): model.problem = error.localizedDescription
            }
        }
        .toolbar {
            if model.controller.isRunning { Button("Show Run") { model.showsSetup = false } }
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
            }
            switch model.form.textKind {
            case .bundle: EmptyView()
            case .file:
                if let file = model.form.file { LabeledContent("File", value: file.lastPathComponent) }
                Button("Choose a File", systemImage: "doc") { choosesFile = true }
                Toggle("Learn only from answers", isOn: $form.answersOnly)
            case .pasted:
                TextEditor(text: $form.pasted)
                    .frame(minHeight: 120)
                    .accessibilityLabel("Text to train on")
            }
        }
    }

    @ViewBuilder private var memorySection: some View {
        @Bindable var form = model.form
        Section("Memory") {
            Toggle("Stay below a limit", isOn: $form.hasLimit)
            if model.form.hasLimit {
                number("Limit in MB") { TextField("Limit in MB", value: $form.limit, format: .number) }
            }
            switch model.form.fit {
            case .success(let fit):
                LabeledContent("Predicted peak", value: fit.predictedPeak.bytes)
                if let available = fit.available { LabeledContent("Free for the app", value: available.bytes) }
                Label(
                    fit.fits ? "Fits this phone" : "Does not fit: set a limit or take shorter sequences",
                    systemImage: fit.fits ? "checkmark.circle.fill" : "exclamationmark.triangle.fill"
                )
                .foregroundStyle(fit.fits ? .green : .orange)
            case .failure(let error):
                Label(error.message, systemImage: "exclamationmark.triangle.fill").foregroundStyle(.orange)
            }
        }
    }

    private var startSection: some View {
        Section {
            if let part = model.tokenized {
                ProgressView("Tokenizing the text", value: part)
            } else {
                Button {
                    Task { await model.start() }
                } label: {
                    Label("Start", systemImage: "play.fill").frame(maxWidth: .infinity)
                }
                .buttonStyle(.borderedProminent)
                .disabled(!model.canStart)
            }
        }
    }

    private func number(_ title: LocalizedStringKey, @ViewBuilder field: () -> some View) -> some View {
        LabeledContent(title) {
            field().multilineTextAlignment(.trailing).keyboardType(.decimalPad)
        }
    }

    /// Access to the file ends with the choice, so it is copied.
    private func choose(_ url: URL) {
        let copy = URL.temporaryDirectory.appending(path: url.lastPathComponent)
        let granted = url.startAccessingSecurityScopedResource()
        defer { if granted { url.stopAccessingSecurityScopedResource() } }
        do {
            try? FileManager.default.removeItem(at: copy)
            try FileManager.default.copyItem(at: url, to: copy)
            model.form.file = copy
        } catch {
            model.problem = error.localizedDescription
        }
    }
}
