#if os(iOS)
    import ActivityKit
    import Foundation
    import MeSPAppModel

    @MainActor final class SystemLiveActivity: LiveActivityDisplay {
        private var id: String?
        /// The last change of the activity. Each change waits for the one before it.
        private var work: Task<Void, Never>?

        /// Removes Live Activities that a terminated launch of the app left behind.
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
