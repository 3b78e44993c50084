// Xcode 27 and newer have the protocol.
#if os(iOS) && compiler(>=6.4)
    import AppIntents
    import MeSPAppModel

    /// Continues with the run that waits or was cut off, while the app is away: for the Shortcuts app, Siri and the Action button.
    @available(iOS 27.0, *)
    struct ContinueTrainingIntent: LongRunningIntent {
        static let title: LocalizedStringResource = "Continue Training"

        func perform() async throws -> some IntentResult {
            // It may be read in this method alone.
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
