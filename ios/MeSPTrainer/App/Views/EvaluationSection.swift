import MeSPAppModel
import SwiftUI

struct EvaluationSection: View {
    @Environment(AppModel.self) private var model
    @State private var runID: StoredRun.ID?
    @State private var choosesFile = false

    private var evaluation: Evaluation { model.evaluation }
    private var trained: [StoredRun] { model.library.trained }
    private var run: StoredRun? { trained.first { $0.id == runID } ?? trained.first }

    var body: some View {
        Section {
            if !trained.isEmpty {
                Picker("Run", selection: $runID) {
                    Text("The latest").tag(StoredRun.ID?.none)
                    ForEach(trained) { Text($0.name).tag(Optional($0.id)) }
                }
            }
            if let progress = evaluation.progress {
                ProgressView("Measuring", value: progress)
                Button("Stop", systemImage: "stop.fill", role: .destructive) { evaluation.stop() }
            } else {
                Button("Measure on a File", systemImage: "checklist") { choosesFile = true }
                    .disabled(!model.isFree || (run == nil && model.form.bundle == nil))
                    // The modifier is on the button, because SwiftUI applies a section's modifier to each row.
                    .fileImporter(isPresented: $choosesFile, allowedContentTypes: [.plainText, .json, .data]) {
                        result in
                        switch result {
                        case .success(let url): Task { await url.accessed { await model.evaluate(url, with: run) } }
                        case .failure(let error): model.problem = "\(error.localizedDescription)"
                        }
                    }
            }
            if let problem = evaluation.problem { ProblemLabel(problem.localized) }
            if let notice = evaluation.notice { NoticeRows(notices: [notice.localized]) }
            if let score = evaluation.score { ScoreRows(score: score) }
        } header: {
            Text("Base and fine-tuned")
        } footer: {
            Text("A JSONL file whose records have a text, a prompt with choices and an answer, or a conversation.")
        }
    }
}

private struct ScoreRows: View {
    let score: Evaluation.Score

    private var name: LocalizedStringKey {
        switch score.kind {
        case .perplexity: "Perplexity per token, lower is better"
        case .accuracy: "Right choices"
        case .exactMatch: "Right answers"
        }
    }

    var body: some View {
        LabeledContent("Records", value: score.records.formatted())
        Text(name).font(.headline)
        LabeledContent("Base", value: shown(score.base))
        if let tuned = score.tuned { LabeledContent("Fine-tuned", value: shown(tuned)) }
        if let difference = score.difference {
            LabeledContent(
                "Difference, 95%", value: "\(shown(difference.lowerBound)) … \(shown(difference.upperBound))")
        }
    }

    private func shown(_ value: Double) -> String {
        score.kind == .perplexity
            ? value.formatted(.number.precision(.fractionLength(2)))
            : value.formatted(.percent.precision(.fractionLength(1)))
    }
}
