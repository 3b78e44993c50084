#if os(iOS)
    import ActivityKit

    /// The content of a Live Activity of a run. The app, which fills it in, and the widget, which lays it out, both compile this file: iOS
    /// knows the type by its name.
    struct RunAttributes: ActivityAttributes {
        struct ContentState: Codable, Hashable, Sendable {
            /// From 0 to 1.
            var part: Double
            var step: String
            /// nil before the first step.
            var loss: String?
            /// nil before the first step, and after the last.
            var timeLeft: String?
            /// Why the run waits, or how it has ended.
            var note: String?
        }

        var title: String
        /// The text in place of figures that are no longer true.
        var staleNote: String
    }
#endif
