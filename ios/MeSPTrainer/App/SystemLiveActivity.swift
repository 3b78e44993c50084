#if os(iOS)
    import ActivityKit
    import Foundation
    import MeSPAppModel

    /// The display of the run as a Live Activity on the lock screen.
    @MainActor final class SystemLiveActivity: LiveActivityDisplay {
        /// The identifier of the activity in progress; nil for none.
        private var id: String?
        /// The change in progress, because changes are made one after another.
        private var work: Task<Void, Never>?

        /// Removes the activities of runs during which the app was terminated.
        init() {
            for left in Activity<RunAttributes>.activities.map(\.id) { change { await Self.end(left, nil) } }
        }

        func begin(title: Sentence, _ content: LiveActivityContent) {
            guard ActivityAuthorizationInfo().areActivitiesEnabled else { return }
            let stale: Sentence = "This status is out of date. Open the app to see the run."
            let attributes = RunAttributes(title: title.localized, staleNote: stale.localized)
            id = try? Activity.request(attributes: attributes, content: content.forActivityKit).id
        }

        func update(_ content: LiveActivityContent) {
            guard let id else { return }
            let content = content.forActivityKit
            change { await Self.update(id, content) }
        }

        func end(_ last: LiveActivityContent?) {
            guard let id else { return }
            let content = last?.forActivityKit
            self.id = nil
            change { await Self.end(id, content) }
        }

        private func change(_ body: @escaping @Sendable () async -> Void) {
            work = Task { [work] in
                await work?.value
                await body()
            }
        }

        nonisolated private static func update(
            _ id: String, _ content: ActivityContent<RunAttributes.ContentState>
        ) async {
            for activity in Activity<RunAttributes>.activities where activity.id == id {
                await activity.update(content)
            }
        }

        nonisolated private static func end(
            _ id: String, _ content: ActivityContent<RunAttributes.ContentState>?
        ) async {
            for activity in Activity<RunAttributes>.activities where activity.id == id {
                await activity.end(content, dismissalPolicy: content == nil ? .immediate : .default)
            }
        }
    }

    extension LiveActivityContent {
        fileprivate var forActivityKit: ActivityContent<RunAttributes.ContentState> {
            let state = RunAttributes.ContentState(
                part: progress.part, step: progress.stepWords.localized, loss: progress.lossWords?.localized,
                timeLeft: progress.timeWords?.localized, note: note?.localized)
            return ActivityContent(state: state, staleDate: lifetime.map { Date(timeIntervalSinceNow: $0) })
        }
    }
#endif
