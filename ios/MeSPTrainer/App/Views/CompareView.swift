import MeSPAppModel
import SwiftUI
import UniformTypeIdentifiers

struct CompareView: View {
    @Environment(AppModel.self) private var model
    @State private var steps = 5
    @State private var work: Task<Void, Never>?

    private var benchmark: Benchmark { model.benchmark }

    var body: some View {
        NavigationStack {
            List {
                EvaluationSection()
                Section {
                    LabeledContent("Model", value: model.form.bundle?.name ?? String(localized: "None"))
                    LabeledContent("Tokens in a sequence", value: model.form.settings.seqLen.formatted())
                    LabeledContent("Rank", value: model.form.settings.rank.formatted())
                    Stepper("\(steps) steps per method", value: $steps, in: 1...50)
                    if let method = benchmark.running {
                        ProgressView("\(method.name): step \(model.controller.log.lastStep) of \(steps)")
                        Button("Stop", systemImage: "stop.fill", role: .destructive) { work?.cancel() }
                    } else {
                        Button("Measure", systemImage: "play.fill") {
                            work = Task { await model.compareMethods(steps: steps) }
                        }
                        .disabled(!model.canStart)
                    }
                    if let problem = benchmark.problem { ProblemLabel(problem.localized) }
                } footer: {
                    Text("Length, rank and model are the settings of a new run. Let the phone cool down first.")
                }
                if !benchmark.rows.isEmpty {
                    Section {
                        ForEach(benchmark.rows) { BenchmarkRow(row: $0) }
                        ShareLink(item: BenchmarkFile(rows: benchmark.csv), preview: SharePreview("benchmark.csv")) {
                            Label("Share as CSV", systemImage: "square.and.arrow.up")
                        }
                        if let json = try? benchmark.json {
                            ShareLink(item: BenchmarkJSON(rows: json), preview: SharePreview("benchmark.json")) {
                                Label("Share as JSON", systemImage: "square.and.arrow.up")
                            }
                        }
                    } header: {
                        Text("This phone and the paper")
                    } footer: {
                        Text(
                            "The paper’s figures are for MeSP on an iPhone 17 Pro with 4-bit weights at rank 8. Peaks here include the whole app."
                        )
                    }
                }
            }
            .navigationTitle("Compare")
        }
    }
}

private struct BenchmarkRow: View {
    let row: Benchmark.Row

    private var seconds: String { row.seconds.formatted(.number.precision(.fractionLength(2))) }

    var body: some View {
        VStack(alignment: .leading, spacing: 4) {
            Text(row.method.name).font(.headline)
            ViewThatFits(in: .horizontal) {
                Grid(alignment: .trailing, horizontalSpacing: 16) {
                    GridRow {
                        Text("")
                        Text("Here")
                        Text("Paper")
                    }
                    .foregroundStyle(.secondary)
                    ForEach(figures) { figure in
                        GridRow {
                            Text(figure.name).gridColumnAlignment(.leading)
                            Text(figure.here ?? "–")
                            Text(figure.paper ?? "–")
                        }
                    }
                }
                VStack(alignment: .leading, spacing: 8) {
                    ForEach(figures) { figure in
                        VStack(alignment: .leading) {
                            Text(figure.name)
                            if let here = figure.here { Text("Here: \(here)") }
                            if let paper = figure.paper { Text("Paper: \(paper)") }
                        }
                    }
                }
            }
            .font(.callout).monospacedDigit()
            if row.thermalState != "nominal" {
                TintedLabel(
                    String(localized: "Thermal state \(row.thermalState)"), systemImage: "thermometer.medium",
                    tint: .orange
                )
                .font(.caption)
            }
        }
        .accessibilityElement(children: .combine)
    }

    private struct Figure: Identifiable {
        let id: Int
        let name: LocalizedStringKey
        let here: String?
        let paper: String?
    }

    private var figures: [Figure] {
        [
            Figure(id: 0, name: "Peak", here: row.footprintPeakBytes.bytes, paper: row.paperBytes?.bytes),
            Figure(id: 1, name: "Before the run", here: row.footprintBeforeBytes.bytes, paper: nil),
            Figure(id: 2, name: "Predicted", here: row.predictedPeakBytes.bytes, paper: nil),
            Figure(id: 3, name: "Time of a step", here: String(localized: "\(seconds) s"), paper: nil),
            Figure(
                id: 4, name: "Time relative to MeBP", here: row.timeOfMebp?.times, paper: row.paperTimeOfMebp?.times),
        ]
    }
}

private struct BenchmarkFile: Transferable {
    let rows: String

    static var transferRepresentation: some TransferRepresentation {
        DataRepresentation(exportedContentType: .commaSeparatedText) { (file: BenchmarkFile) in Data(file.rows.utf8) }
            .suggestedFileName("benchmark.csv")
    }
}

private struct BenchmarkJSON: Transferable {
    let rows: Data

    static var transferRepresentation: some TransferRepresentation {
        DataRepresentation(exportedContentType: .json) { (file: BenchmarkJSON) in file.rows }
            .suggestedFileName("benchmark.json")
    }
}
