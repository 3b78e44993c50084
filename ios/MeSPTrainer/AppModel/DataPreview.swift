import Foundation
import MeSP
import MeSPBundle
import MeSPCore
import MeSPSentences
import Observation

extension TrainingPreview {
    /// The spans as VoiceOver reads them. Each begins with whether it is in the loss.
    public var spoken: [Sentence] {
        spans.map { $0.isTrained ? "In the loss: \($0.text)" : "Not in the loss: \($0.text)" }
    }
}

@MainActor @Observable public final class DataPreview {
    public struct Inputs: Hashable, Sendable {
        let bundle: StoredBundle.ID?
        let kind: TrainingForm.TextKind
        let file: URL?
        let pasted: String
        let choices: Int
        let answersOnly: Bool
        let length: Int
    }

    public var current: TrainingPreview? { inputs == last ? try? result?.get() : nil }
    /// The error of the preview of the form's text, or nil. It is always nil for the bundle's own text.
    public var problem: Sentence? {
        guard inputs == last, case .failure(let error) = result else { return nil }
        return error.sentence
    }

    private var result: Result<TrainingPreview, MeSPError>?
    private var last: Inputs?

    @ObservationIgnored private let form: TrainingForm
    @ObservationIgnored private let choices: ChoiceList
    @ObservationIgnored private let loadTokenizer: @Sendable (URL) async throws -> any TextTokenizer
    @ObservationIgnored private var tokenizer: (bundle: URL, tokenizer: any TextTokenizer)?

    init(
        form: TrainingForm, choices: ChoiceList,
        loadTokenizer: @escaping @Sendable (URL) async throws -> any TextTokenizer
    ) {
        (self.form, self.choices, self.loadTokenizer) = (form, choices, loadTokenizer)
    }

    public var inputs: Inputs {
        Inputs(
            bundle: form.bundleID, kind: form.textKind, file: form.textKind == .file ? form.file : nil,
            pasted: form.textKind == .pasted ? form.pasted : "",
            choices: form.textKind == .choices ? choices.list.count : 0, answersOnly: form.answersOnly,
            length: form.settings.seqLen)
    }

    func read(pause: Duration = .milliseconds(300)) async {
        let inputs = inputs
        if inputs != last { (last, result) = (inputs, nil) }
        if inputs.kind == .pasted { try? await Task.sleep(for: pause) }
        guard !Task.isCancelled, let bundle = form.bundle?.url, hasText(inputs) else { return }
        do {
            let tokenizer = try await tokenizer(of: bundle)
            let (length, source) = (inputs.length, try form.source())
            let data = TextData(tokenizer: tokenizer, length: length, answersOnly: inputs.answersOnly)
            let preview =
                try await Task.detached {
                    if let source {
                        let (example, notices) = try data.first(of: source)
                        return TrainingPreview(example, notices: notices.sentences, tokenizer: tokenizer)
                    }
                    let tokens = try ModelBundle(url: bundle, checksums: false).tokens("train")
                    guard let sequences = tokens?.sequences(lengths: [length]), sequences.count > 0 else { return nil }
                    return TrainingPreview(sequences[0], tokenizer: tokenizer)
                }.value as TrainingPreview?
            if inputs == last { result = preview.map { .success($0) } }
        } catch {
            // A bundle's own text can be used for training even if its preview fails.
            if inputs == last, !Task.isCancelled, inputs.kind != .bundle {
                result = .failure(MeSPError(error.plainSentence))
            }
        }
    }

    func freeTokenizer() { tokenizer = nil }

    private func hasText(_ inputs: Inputs) -> Bool {
        switch inputs.kind {
        case .bundle: true
        case .file: inputs.file != nil
        case .pasted: inputs.pasted.contains { !$0.isWhitespace }
        case .choices: inputs.choices > 0
        }
    }

    private func tokenizer(of bundle: URL) async throws -> any TextTokenizer {
        if let tokenizer, tokenizer.bundle == bundle { return tokenizer.tokenizer }
        let loaded = try await loadTokenizer(bundle)
        tokenizer = (bundle, loaded)
        return loaded
    }
}
