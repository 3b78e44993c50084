import MeSPAppModel
import MeSPTokenizers
import SwiftUI

@main struct MeSPTrainerApp: App {
    private let model: AppModel
    #if os(macOS)
        @NSApplicationDelegateAdaptor private var delegate: MacDelegate
    #endif

    /// The app creates its model here because iOS accepts background task handlers only until the app has launched.
    init() {
        let folder = DocumentsFolder(documents: .documentsDirectory, included: Bundle.main.resourceURL)
        let recording = Bundle.main.resourceURL?.appending(path: "Recorded")
        #if os(iOS)
            let background = BackgroundTransfer(identifier: Self.downloads)
            model = AppModel(
                monitor: SystemMonitor(), folder: folder, display: WindowDisplay(), scheduler: SystemBackground(),
                notificationDisplay: SystemNotifications(), activityDisplay: SystemLiveActivity(),
                network: SystemNetwork(), recording: recording,
                openDownload: { try HubDownload(repository: $0, background: background) },
                loadTokenizer: { try await loadTokenizer(bundle: $0) })
        #else
            model = AppModel(
                monitor: SystemMonitor(), folder: folder, notificationDisplay: SystemNotifications(),
                network: SystemNetwork(),
                recording: recording
            ) { try await loadTokenizer(bundle: $0) }
        #endif
    }

    #if os(iOS)
        private static let downloads = "downloads"

        var body: some Scene {
            // The system wakes or launches the app when downloads have finished.
            WindowGroup { RootView().environment(model) }
                .backgroundTask(.urlSession(Self.downloads)) { [model] in await model.finishDownload() }
        }
    #else
        var body: some Scene {
            Window("MeSP Trainer", id: "main") { RootView().environment(model) }
                .commands {
                    CommandGroup(after: .toolbar) {
                        Button("Refresh") { Task { await model.refresh() } }.keyboardShortcut("r")
                    }
                }
        }
    #endif
}

#if os(macOS)
    @MainActor final class MacDelegate: NSObject, NSApplicationDelegate {
        func applicationShouldTerminateAfterLastWindowClosed(_ sender: NSApplication) -> Bool { false }
    }
#endif

struct RootView: View {
    @Environment(AppModel.self) private var model
    @Environment(\.scenePhase) private var scenePhase

    var body: some View {
        @Bindable var model = model
        TabView(selection: $model.tab) {
            TrainView().tabItem { Label("Train", systemImage: "chart.line.downtrend.xyaxis") }.tag(AppModel.Tab.train)
            TryView().tabItem { Label("Try", systemImage: "text.bubble") }.tag(AppModel.Tab.tryIt)
            RunsView().tabItem { Label("Runs", systemImage: "list.bullet.rectangle") }.tag(AppModel.Tab.runs)
            BundlesView().tabItem { Label("Models", systemImage: "shippingbox") }.tag(AppModel.Tab.bundles)
            CompareView().tabItem { Label("Compare", systemImage: "gauge.with.needle") }.tag(AppModel.Tab.compare)
        }
        .overlay { if model.screen.isDimmed { NightView() } }
        .alert("That Did Not Work", isPresented: $model.hasProblem) {
            Button("OK") {}
        } message: {
            Text(model.problem?.localized ?? "")
        }
        .alert("Rewrite This Model?", isPresented: $model.asksToImport) {
            Button("Rewrite") { model.answerImport(true) }
            Button("Cancel", role: .cancel) { model.answerImport(false) }
        } message: {
            Text(model.importQuestion.map(\.localized).joined(separator: " "))
        }
        .onOpenURL { url in Task { await url.accessed { await model.open(url) } } }
        .confirmationDialog(
            model.deletionQuestion.localized, isPresented: $model.asksToDelete, titleVisibility: .visible
        ) {
            Button("Delete", role: .destructive) { Task { await model.confirmDeletion() } }
        }
        .onChange(of: scenePhase) { if scenePhase == .active { Task { await model.refresh() } } }
        .onChange(of: model.controller.isRunning) { Task { await model.refresh() } }
        .staysAwake(model.staysAwake)
        // On a Mac, only the grouped style scrolls.
        .formStyle(.grouped)
        .task {
            await model.refresh()
            model.begin(arguments: ProcessInfo.processInfo.arguments)
            await model.finishDownload()
        }
    }
}
