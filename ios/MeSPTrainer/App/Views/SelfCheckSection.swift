import MeSPAppModel
import SwiftUI

struct SelfCheckSection: View {
    @Environment(AppModel.self) private var model

    private var checker: SelfChecker { model.selfChecker }

    var body: some View {
        Section {
            if checker.isRunning {
                ProgressView("Checking \(checker.current ?? String(localized: "the bundle"))")
                Button("Stop", systemImage: "stop.fill", role: .destructive) { checker.stop() }
            } else {
                Button("Check This Phone", systemImage: "checkmark.seal") { model.checkDevice() }
                    .disabled(!model.isFree || model.form.bundle == nil)
            }
            if let problem = checker.problem { ProblemLabel(problem.localized) }
            ForEach(checker.report?.checks ?? []) { CheckRow(check: $0) }
            ShareLink(
                item: Measurements(folder: model.library.folder), preview: SharePreview(Measurements.name)
            ) {
                Label("Share What Was Measured", systemImage: "square.and.arrow.up")
            }
        } header: {
            Text("Self-check")
        } footer: {
            Text(
                "The report is in the app’s folder self-check. tools/check_gpu.py makes a page of it. Sharing includes all reports and the logs of runs, but no texts or adapters."
            )
        }
    }
}

private struct CheckRow: View {
    let check: SelfCheckReport.Check

    private var symbol: String {
        switch check.verdict {
        case .pass: "checkmark.circle.fill"
        case .fail: "xmark.octagon.fill"
        case .note: "ruler"
        case .skipped: "minus.circle"
        }
    }

    var body: some View {
        VStack(alignment: .leading, spacing: 4) {
            TintedLabel(
                "\(check.name): \(check.verdict.rawValue)", systemImage: symbol,
                tint: check.verdict == .fail ? .red : .primary)
            Text(check.sentence.localized).font(.caption).foregroundStyle(.secondary)
        }
        .accessibilityElement(children: .combine)
    }
}
