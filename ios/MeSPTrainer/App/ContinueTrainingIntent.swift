// Xcode 27 and newer have LongRunningIntent.
#if os(iOS) && compiler(>=6.4)
    import AppIntents
    import MeSPAppModel

    /// Continues a waiting or interrupted run in the background. Shortcuts, Siri and the Action button offer this intent.
    @available(iOS 27.0, *)
    struct ContinueTrainingIntent: LongRunningIntent {
        static let title: LocalizedStringResource = "Continue Training"

        func perform() async throws -> some IntentResult {
            // `progress` may be read only in this method, so the closure below uses a copy.
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
