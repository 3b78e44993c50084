import MeSPAppModel
import MeSPCore
import SwiftUI

@main struct MeSPTrainerApp: App {
    @State private var model = AppModel(
        phone: SystemPhone(), folder: DocumentsFolder(documents: .documentsDirectory, included: Bundle.main.resourceURL)
    ) { try await BundleTokenizer(bundle: $0) }

    var body: some Scene {
        WindowGroup {
            if let refusal = AppModel.refusal {
                ContentUnavailableView("Not in the Simulator", systemImage: "iphone.slash", description: Text(refusal))
            } else {
                RootView().environment(model)
            }
        }
    }
}

/// The tabs, and what belongs to all of them.
struct RootView: View {
    @Environment(AppModel.self) private var model
    @Environment(\.scenePhase) private var scenePhase

    var body: some View {
        @Bindable var model = model
        TabView {
            TrainView().tabItem { Label("Train", systemImage: "chart.line.downtrend.xyaxis") }
            TryView().tabItem { Label("Try", systemImage: "text.bubble") }
            RunsView().tabItem { Label("Runs", systemImage: "list.bullet.rectangle") }
            BundlesView().tabItem { Label("Models", systemImage: "shippingbox") }
            CompareView().tabItem { Label("Compare", systemImage: "gauge.with.needle") }
        }
        .overlay { if model.screen.isDimmed { NightView() } }
        .alert("That Did Not Work", isPresented: $model.hasProblem) {
            Button("OK") {}
        } message: {
            Text(model.problem ?? "")
        }
        .onOpenURL { url in Task { await url.accessed { await model.importBundle(at: url) } } }
        .onChange(of: scenePhase) { if scenePhase == .active { model.refresh() } }
        .onChange(of: model.controller.isRunning) { model.refresh() }
        .onChange(of: model.staysAwake, initial: true) {
            UIApplication.shared.isIdleTimerDisabled = model.staysAwake
        }
        .onAppear { model.begin(arguments: ProcessInfo.processInfo.arguments) }
    }
}
