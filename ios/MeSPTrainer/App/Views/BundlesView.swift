import MeSPAppModel
import MeSPCore
import SwiftUI
import UniformTypeIdentifiers

/// The bundles on the phone, and the way to bring in more.
struct BundlesView: View {
    @Environment(AppModel.self) private var model
    @State private var choosesBundle = false

    var body: some View {
        NavigationStack {
            List {
                Section {
                    ForEach(model.library.bundles) { bundle in
                        BundleRow(bundle: bundle, isChosen: bundle.id == model.form.bundle?.id)
                            .contentShape(.rect)
                            .onTapGesture { if bundle.problem == nil { model.form.select(bundle) } }
                            .accessibilityAddTraits(.isButton)
                            .deleteDisabled(bundle.isIncluded)
                    }
                    .onDelete { rows in
                        let chosen = rows.map { model.library.bundles[$0] }
                        Task { for bundle in chosen { await model.delete(bundle) } }
                    }
                    if let name = model.library.importing { ProgressView("Copying and checking \(name)") }
                } footer: {
                    Text(
                        "Make a bundle with mesp-export on a computer. Bring it here by AirDrop, from Files, or with tools/push.py."
                    )
                }
                SelfCheckSection()
            }
            .navigationTitle("Models")
            .toolbar {
                Button("Add a Bundle", systemImage: "plus") { choosesBundle = true }.disabled(
                    model.library.importing != nil)
            }
            .fileImporter(isPresented: $choosesBundle, allowedContentTypes: [.mespBundle, .folder]) { result in
                switch result {
                case .success(let url): Task { await url.accessed { await model.importBundle(at: url) } }
                case .failure(let error): model.problem = error.localizedDescription
                }
            }
            .refreshable { await model.refresh() }
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
                    "\(bundle.size.bytes), \(manifest.architecture.numHiddenLayers) blocks, \(manifest.quantization.bits) bits, \(manifest.device == "gpu" ? "GPU" : "CPU"), sequences of \(manifest.seqLens.map { $0.formatted() }.formatted(.list(type: .or))) tokens"
                )
                .font(.caption).foregroundStyle(.secondary)
            }
            if let problem = bundle.problem {
                Label(problem, systemImage: "exclamationmark.triangle.fill").font(.caption).foregroundStyle(.orange)
            }
            if let advice = bundle.advice {
                Label(advice, systemImage: "info.circle").font(.caption).foregroundStyle(.secondary)
            }
        }
        .accessibilityElement(children: .combine)
    }
}
