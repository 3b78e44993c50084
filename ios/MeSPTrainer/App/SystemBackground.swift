#if os(iOS)
    @preconcurrency import BackgroundTasks
    import Foundation
    import MeSPAppModel

    /// Time in the background from `BGTaskScheduler`. Info.plist permits the identifiers.
    @MainActor final class SystemBackground: BackgroundScheduler {
        /// The app's scheduler, which its intent uses.
        private(set) static weak var current: SystemBackground?

        var onGrant: ((any BackgroundTime) -> Void)?

        /// False without the entitlement *Background GPU Access*, and on devices that do not give the GPU.
        var givesGPU: Bool {
            #if compiler(>=6.2)
                if #available(iOS 26.0, *) { return BGTaskScheduler.supportedResources.contains(.gpu) }
            #endif
            return false
        }

        private let prefix = Bundle.main.bundleIdentifier ?? "org.mesp.MeSPTrainer"
        private var overnight: String { prefix + ".overnight" }
        /// The identifier of the last request for a run that the person started; each has its own.
        private var continued: String?
        /// Whether there is a handler: to ask for a time without one ends the app.
        private var hasOvernight = false

        /// To be made before the app has launched: the system may have started it for the night's task.
        init() {
            hasOvernight = register(overnight, for: .overnight)
            Self.current = self
        }

        func ask(for grant: BackgroundGrant, title: Sentence) {
            switch grant {
            case .overnight:
                guard hasOvernight else { return }
                let request = BGProcessingTaskRequest(identifier: overnight)
                request.requiresExternalPower = true
                try? BGTaskScheduler.shared.submit(request)
            case .continued, .continuedOnGPU:
                // Older SDKs, and systems, have no such task: the run waits for the app to come back.
                #if compiler(>=6.2)
                    if #available(iOS 26.0, *) {
                        let identifier = "\(prefix).run.\(UUID().uuidString)"
                        guard register(identifier, for: grant) else { return }
                        continued = identifier
                        let subtitle: Sentence = "Checking the bundle"
                        let request = BGContinuedProcessingTaskRequest(
                            identifier: identifier, title: title.localized, subtitle: subtitle.localized)
                        if grant == .continuedOnGPU { request.requiredResources = .gpu }
                        try? BGTaskScheduler.shared.submit(request)
                    }
                #endif
            }
        }

        func withdraw(_ grant: BackgroundGrant) {
            guard let identifier = grant == .overnight ? overnight : continued else { return }
            BGTaskScheduler.shared.cancel(taskRequestWithIdentifier: identifier)
        }

        /// - Returns: whether Info.plist permits the identifier.
        private func register(_ identifier: String, for grant: BackgroundGrant) -> Bool {
            BGTaskScheduler.shared.register(forTaskWithIdentifier: identifier, using: .main) {
                @Sendable [weak self] task in
                MainActor.assumeIsolated {
                    guard let onGrant = self?.onGrant else { return task.setTaskCompleted(success: false) }
                    onGrant(Time(task, grant))
                }
            }
        }

        private final class Time: BackgroundTime {
            let grant: BackgroundGrant
            var onExpiration: (() -> Void)?
            private let task: BGTask

            init(_ task: BGTask, _ grant: BackgroundGrant) {
                (self.task, self.grant) = (task, grant)
                // Called on any thread.
                task.expirationHandler = { @Sendable [weak self] in
                    Task { @MainActor [weak self] in self?.onExpiration?() }
                }
            }

            func show(_ progress: RunProgress) {
                #if compiler(>=6.2)
                    if #available(iOS 26.0, *), let task = task as? BGContinuedProcessingTask {
                        task.progress.totalUnitCount = progress.units
                        task.progress.completedUnitCount = progress.unitsDone
                        task.updateTitle(task.title, subtitle: progress.sentence.localized)
                    }
                #endif
            }

            func end(success: Bool) { task.setTaskCompleted(success: success) }
        }
    }
#endif
