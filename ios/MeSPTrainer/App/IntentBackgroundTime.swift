#if os(iOS)
    import Foundation
    import MeSPAppModel

    @MainActor final class IntentBackgroundTime: BackgroundTime {
        let grant: BackgroundGrant
        var onExpiration: (() -> Void)?
        private let progress: Progress
        private var whenEnded: CheckedContinuation<Bool, Never>?

        init(_ grant: BackgroundGrant, _ progress: Progress) { (self.grant, self.progress) = (grant, progress) }

        /// Gives the background time to the app's scheduler and waits until the time ends.
        ///
        /// - Throws: `MeSPError` if the run did not finish, or if there is no run.
        func pass() async throws {
            let hasFinished = await withTaskCancellationHandler {
                await withCheckedContinuation {
                    whenEnded = $0
                    guard let onGrant = SystemBackground.current?.onGrant else { return end(success: false) }
                    onGrant(self)
                }
            } onCancel: {
                Task { @MainActor in onExpiration?() }
            }
            guard hasFinished else { throw MeSPError("Training did not finish; open the app to see why.") }
        }

        func show(_ progress: RunProgress) {
            self.progress.totalUnitCount = progress.units
            self.progress.completedUnitCount = progress.unitsDone
        }

        func end(success: Bool) {
            whenEnded?.resume(returning: success)
            whenEnded = nil
        }
    }
#endif
