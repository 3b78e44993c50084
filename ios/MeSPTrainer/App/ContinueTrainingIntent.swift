// Xcode 27 and newer have LongRunningIntent.
#if os(iOS) && compiler(>=6.4)
    import AppIntents
    import MeSPAppModel

    /// Continues a waiting or interrupted run while the app is in the background. The Shortcuts app, Siri and the Action button offer it.
    @available(iOS 27.0, *)
    struct ContinueTrainingIntent: LongRunningIntent {
        static let title: LocalizedStringResource = "Continue Training"

        func perform() async throws -> some IntentResult {
            // The property may be read only in this method.
            let progress = progress
            let grant: BackgroundGrant =
                await SystemBackground.current?.givesGPU == true ? .continuedOnGPU : .continued
            try await performBackgroundTask(options: grant == .continuedOnGPU ? .requiresGPU : []) {
                try await IntentBackgroundTime(grant, progress).pass()
            }
            return .result()
        }
    }
#endif
