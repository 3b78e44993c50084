#if os(iOS)
    import ActivityKit
    import MeSPAppModel
    import MeSPCore

    /// The run on the lock screen, as a Live Activity.
    @MainActor final class SystemActivity: GlanceBoard {
        /// The activity in progress.
        private var id: String?
        /// What is under way: iOS gets one change after the other.
        private var work: Task<Void, Never>?

        /// Takes away what is shown of a run that the app was ended in.
        init() {
            for left in Activity<RunAttributes>.activities.map(\.id) { change { await Self.end(left, nil) } }
        }

        func begin(title: Sentence, _ glance: Glance) {
            guard ActivityAuthorizationInfo().areActivitiesEnabled else { return }
            let content = ActivityContent(state: glance.state, staleDate: nil)
            id = try? Activity.request(attributes: RunAttributes(title: title.localized), content: content).id
        }

        func update(_ glance: Glance) {
            guard let id else { return }
            let state = glance.state
            change { await Self.update(id, state) }
        }

        func end(_ last: Glance?) {
            guard let id else { return }
            let state = last?.state
            self.id = nil
            change { await Self.end(id, state) }
        }

        private func change(_ body: @escaping @Sendable () async -> Void) {
            work = Task { [work] in
                await work?.value
                await body()
            }
        }

        nonisolated private static func update(_ id: String, _ state: RunAttributes.ContentState) async {
            for activity in Activity<RunAttributes>.activities where activity.id == id {
                await activity.update(ActivityContent(state: state, staleDate: nil))
            }
        }

        nonisolated private static func end(_ id: String, _ state: RunAttributes.ContentState?) async {
            for activity in Activity<RunAttributes>.activities where activity.id == id {
                await activity.end(
                    state.map { ActivityContent(state: $0, staleDate: nil) },
                    dismissalPolicy: state == nil ? .immediate : .default)
            }
        }
    }

    extension Glance {
        fileprivate var state: RunAttributes.ContentState {
            .init(
                part: progress.part, step: progress.stepWords.localized, loss: progress.lossWords?.localized,
                timeLeft: progress.timeWords?.localized, note: note?.localized)
        }
    }
#endif
