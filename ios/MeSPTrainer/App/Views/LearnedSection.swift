import MeSPAppModel
import SwiftUI

struct LearnedSection: View {
    @Environment(AppModel.self) private var model
    let run: StoredRun

    private var examples: LearnedExamples { model.examples }

    var body: some View {
        if model.canShowExamples(of: run) {
            Section {
                ForEach(examples.of(run)) { SampleRow(sample: $0) }
                if examples.writing == run.id {
                    ProgressView("Writing examples")
                    Button("Stop", systemImage: "stop.fill", role: .destructive) { examples.stop() }
                } else if examples.of(run).isEmpty {
                    if let problem = examples.problem(of: run) { ProblemLabel(problem.localized) }
                    Button("Show Two Examples", systemImage: "text.quote") { model.showExamples(of: run) }
                        .disabled(!model.isFree)
                }
                // The task is on one row, because SwiftUI runs a section's task once for each row.
                Button("Try It", systemImage: "text.bubble") { model.openChat(with: run) }
                    .task(id: run.id) { await examples.load(run) }
            } header: {
                Text("What it learned")
            } footer: {
                if !examples.of(run).isEmpty {
                    Text("The model did not train on these texts: they were held out.")
                }
            }
        }
    }
}

private struct SampleRow: View {
    let sample: LearnedExamples.Sample

    var body: some View {
        VStack(alignment: .leading, spacing: 8) {
            Text(sample.prompt + " …").font(.callout)
            answer("Before", sample.before)
            answer("After", sample.after)
        }
        .accessibilityElement(children: .combine)
    }

    private func answer(_ when: LocalizedStringKey, _ text: String) -> some View {
        VStack(alignment: .leading) {
            Text(when).font(.caption).foregroundStyle(.secondary)
            Text(text).font(.callout)
        }
    }
}
