#if os(iOS)
    import ActivityKit

    /// The content of a run's Live Activity. The app and the widget both compile this file, because iOS identifies the type by its name.
    struct RunAttributes: ActivityAttributes {
        struct ContentState: Codable, Hashable, Sendable {
            /// The completed fraction, from 0 to 1.
            var part: Double
            var step: String
            var loss: String?
            var timeLeft: String?
            var note: String?
        }

        var title: String
        /// The text to show in place of outdated figures.
        var staleNote: String
    }
#endif
