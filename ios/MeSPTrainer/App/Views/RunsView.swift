import MeSPAppModel
import SwiftUI

struct RunsView: View {
    @Environment(AppModel.self) private var model
    @State private var path: [StoredRun.ID] = []

    var body: some View {
        NavigationStack(path: $path) {
            List {
                ForEach(model.library.runs) { run in
                    NavigationLink(value: run.id) { RunRow(run: run) }
                        .deleteDisabled(run.status == .running)
                        .contextMenu {
                            Button("Delete", systemImage: "trash", role: .destructive) { model.askToDelete(.run(run)) }
                        }
                }
                .onDelete { rows in
                    if let row = rows.first { model.askToDelete(.run(model.library.runs[row])) }
                }
            }
            .overlay {
                if model.library.hasLooked, model.library.runs.isEmpty {
                    ContentUnavailableView(
                        "No Runs Yet", systemImage: "list.bullet.rectangle",
                        description: Text("Your runs are kept here, and in the app’s folder in Files."))
                }
            }
            .navigationTitle("Runs")
            .navigationDestination(for: StoredRun.ID.self) { id in
                if let run = model.library.runs.first(where: { $0.id == id }) { RunDetailView(run: run) }
            }
            .refreshable { await model.refresh() }
            .onChange(of: model.library.runs.map(\.id)) {
                path.removeAll { id in !model.library.runs.contains { $0.id == id } }
            }
        }
    }
}

private struct RunRow: View {
    let run: StoredRun

    var body: some View {
        VStack(alignment: .leading) {
            Text(run.name)
            HStack {
                Text(run.status.name)
                if let log = run.log {
                    Text("\(log.lastStep) steps")
                    if let loss = log.lastLoss {
                        Text("loss \(loss.formatted(.number.precision(.fractionLength(2))))")
                    }
                }
            }
            .font(.caption).foregroundStyle(.secondary)
        }
        .accessibilityElement(children: .combine)
    }
}

struct RunDetailView: View {
    @Environment(AppModel.self) private var model
    let run: StoredRun
    @State private var log: LogSummary?

    var body: some View {
        List {
            Section {
                LabeledContent("State") { Text(run.status.name) }
                if case .unreadable(let reason) = run.status { ProblemLabel(reason.localized) }
                if run.canResume {
                    Button("Resume from the Last Saved State", systemImage: "play.fill") {
                        Task { await model.resume(run) }
                    }
                    .disabled(!model.isFree)
                }
            }
            LearnedSection(run: run)
            Section {
                ShareLink(item: Archive(run: run), preview: SharePreview(run.name)) {
                    Label("Share Log and Adapters", systemImage: "square.and.arrow.up")
                }
                if run.adapters != nil {
                    ShareLink(
                        item: Archive(run: run, adaptersOnly: true), preview: SharePreview("\(run.name) adapters")
                    ) {
                        Label("Share Adapters Only", systemImage: "square.and.arrow.up.on.square")
                    }
                }
                Button("Delete Run", systemImage: "trash", role: .destructive) { model.askToDelete(.run(run)) }
                    .disabled(run.status == .running)
            }
            if let log { LogSections(log: log) }
        }
        .task(id: run.id) { log = await model.library.log(of: run) }
        .navigationTitle(run.name)
        .inlineTitle()
    }
}
