import MeSPAppModel
import SwiftUI
import UniformTypeIdentifiers

struct BundlesView: View {
    @Environment(AppModel.self) private var model
    @State private var choosesBundle = false

    var body: some View {
        NavigationStack {
            List {
                Section {
                    ForEach(model.library.bundles) { bundle in
                        HStack {
                            Button {
                                if bundle.problem == nil { model.form.select(bundle) }
                            } label: {
                                BundleRow(bundle: bundle, isChosen: bundle.id == model.form.bundle?.id)
                                    .contentShape(.rect)
                            }
                            .buttonStyle(.plain)
                            .accessibilityHint(bundle.problem == nil ? "Chooses the model to train" : "")
                            if !bundle.isIncluded {
                                RowMenu(name: bundle.name) { model.askToDelete(.bundle(bundle)) }
                            }
                        }
                        .deleteDisabled(bundle.isIncluded)
                    }
                    .onDelete { rows in
                        if let row = rows.first { model.askToDelete(.bundle(model.library.bundles[row])) }
                    }
                    if let name = model.library.importing {
                        if let rewritten = model.library.rewritten {
                            ProgressView("Rewriting \(name)", value: rewritten)
                            Button("Stop", systemImage: "stop.fill", role: .destructive) { model.library.stopImport() }
                        } else {
                            ProgressView("Copying and checking \(name)")
                        }
                    }
                } footer: {
                    Text(
                        "Get a model from the Hugging Face Hub below, or with + from Files, as a folder in MLX's 4-bit format. Bundles from mesp-export can also arrive by AirDrop."
                    )
                }
                DownloadSection()
                SelfCheckSection()
            }
            .navigationTitle("Models")
            .toolbar {
                Button("Add a Model", systemImage: "plus") { choosesBundle = true }.disabled(
                    model.library.importing != nil)
            }
            .fileImporter(isPresented: $choosesBundle, allowedContentTypes: [.mespBundle, .folder]) { result in
                switch result {
                case .success(let url): Task { await url.accessed { await model.importBundle(at: url) } }
                case .failure(let error): model.problem = "\(error.localizedDescription)"
                }
            }
            .refreshable { await model.refresh() }
        }
    }
}

private struct DownloadSection: View {
    @Environment(AppModel.self) private var model

    private var downloads: DownloadState { model.downloads }

    var body: some View {
        @Bindable var downloads = model.downloads
        Section {
            TextField("owner/name", text: $downloads.repository)
                .plainWords()
                .accessibilityLabel("Repository on the Hugging Face Hub")
                .onSubmit { Task { await model.lookUp() } }
            if let question = downloads.networkQuestion {
                ProblemLabel(question.localized)
                Button("Download Now", systemImage: "arrow.down.circle") { Task { await model.downloadNow() } }
            }
            if downloads.isLooking {
                ProgressView("Asking the Hub")
            } else if let progress = downloads.progress {
                if downloads.isRewriting {
                    ProgressView("Rewriting", value: progress)
                } else {
                    ProgressView("Downloading", value: progress)
                }
                Button("Stop", systemImage: "stop.fill", role: .destructive) { downloads.stop() }
            } else {
                Button("Look It Up", systemImage: "magnifyingglass") { Task { await model.lookUp() } }
                    .disabled(downloads.repository.isEmpty)
                if let offer = downloads.offer {
                    LabeledContent("Model", value: offer.manifest.name)
                    LabeledContent("Download", value: offer.size.bytes)
                    if let space = downloads.spaceWhileRewriting {
                        LabeledContent("On This Device", value: offer.bundleSize.bytes)
                        LabeledContent("While It Is Rewritten", value: space.bytes)
                    }
                    LabeledContent("License") {
                        if let link = offer.licenseLink {
                            Link(downloads.license.localized, destination: link)
                        } else {
                            Text(downloads.license.localized)
                        }
                    }
                    Text(downloads.fit.localized).font(.caption).foregroundStyle(.secondary)
                    Button("Download", systemImage: "arrow.down.circle") { Task { await model.download() } }
                }
                ForEach(downloads.notices, id: \.localized) { notice in
                    Label(notice.localized, systemImage: "info.circle").font(.caption).foregroundStyle(.secondary)
                }
            }
        } header: {
            Text("From the Hugging Face Hub")
        } footer: {
            Text(
                "A bundle, or a model in MLX's 4-bit format such as those of mlx-community. Each file is checked. A model is rewritten into a bundle, and its download is deleted. A download continues while you use other apps. If it stops, the next download continues it."
            )
        }
    }
}

private struct BundleRow: View {
    let bundle: StoredBundle
    let isChosen: Bool

    var body: some View {
        VStack(alignment: .leading, spacing: 4) {
            HStack {
                Text(bundle.name).font(.headline)
                Spacer()
                if isChosen { Image(systemName: "checkmark").accessibilityLabel("Chosen") }
            }
            if let manifest = bundle.manifest {
                Text(
                    "\(bundle.size.bytes), \(manifest.architecture.numHiddenLayers) blocks, \(manifest.quantization.bits) bits, sequences of \(manifest.seqLens.map { $0.formatted() }.formatted(.list(type: .or))) tokens"
                )
                .font(.caption).foregroundStyle(.secondary)
            }
            if let problem = bundle.problem { ProblemLabel(problem.localized).font(.caption) }
        }
        .accessibilityElement(children: .combine)
    }
}
