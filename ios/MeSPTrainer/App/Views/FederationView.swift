import MeSPAppModel
import SwiftUI

struct FederationView: View {
    @Environment(AppModel.self) private var model
    @State private var asks = false

    private var federation: Federation { model.federation }

    var body: some View {
        @Bindable var federation = model.federation
        Form {
            Section {
                TextField("Address", text: $federation.address).plainWords()
                TextField("Name of this device (optional)", text: $federation.name).plainWords()
                LabeledContent("Model", value: model.form.bundle?.name ?? "")
            } header: {
                Text("Server")
            } footer: {
                Text(
                    "The address of a Flower SuperLink begins with https and ends with its port. Training uses the model and the text that you have chosen for a new run."
                )
            }
            .disabled(federation.isOn)
            Section("Allowed") {
                Toggle("Only on unmetered networks", isOn: $federation.sparesData).disabled(federation.isOn)
                Toggle("Only on the charger", isOn: $federation.needsCharger)
            }
            Section {
                if federation.isOn {
                    Label(federation.status.localized, systemImage: "person.3")
                    if let why = federation.passedOver { ProblemLabel(why.localized) }
                    Button("Leave", systemImage: "stop.fill", role: .destructive) { federation.leave() }
                } else if let part = model.tokenized {
                    ProgressView("Tokenizing the text", value: part)
                } else {
                    Button("Take Part", systemImage: "person.3") { asks = true }
                        .disabled(!model.isFree || model.form.bundle == nil || federation.address.isEmpty)
                }
            }
            if !federation.rounds.isEmpty {
                Section("Rounds") { ForEach(federation.rounds) { RoundRow(round: $0) } }
            }
        }
        .navigationTitle("Train with Others")
        .alert("Take Part?", isPresented: $asks) {
            Button("Take Part") { Task { await model.joinFederation() } }
            Button("Cancel", role: .cancel) {}
        } message: {
            Text(Federation.agreement.localized)
        }
    }
}

private struct RoundRow: View {
    let round: Federation.Round

    var body: some View {
        VStack(alignment: .leading, spacing: 4) {
            Text("Round \(round.name)").font(.headline)
            if let problem = round.problem {
                ProblemLabel(problem.localized).font(.caption)
            } else if let bytesUp = round.bytesUp {
                Text("\(round.bytesDown.bytes) received, \(bytesUp.bytes) sent")
                    .font(.caption).foregroundStyle(.secondary)
            } else {
                Text("\(round.bytesDown.bytes) received").font(.caption).foregroundStyle(.secondary)
            }
        }
        .accessibilityElement(children: .combine)
    }
}
