#if os(iOS)
    @preconcurrency import BackgroundTasks
    import Foundation
    import MeSPAppModel

    /// The source of background time from `BGTaskScheduler`. Info.plist permits the identifiers.
    @MainActor final class SystemBackground: BackgroundScheduler {
        /// The app's scheduler, which its intent uses.
        private(set) static weak var current: SystemBackground?

        var onGrant: ((any BackgroundTime) -> Void)?

        /// Whether background tasks may use the GPU: false without the entitlement *Background GPU Access*, and on devices that do not allow it.
        var givesGPU: Bool {
            #if compiler(>=6.2)
                if #available(iOS 26.0, *) { return BGTaskScheduler.supportedResources.contains(.gpu) }
            #endif
            return false
        }

        private let prefix = Bundle.main.bundleIdentifier ?? "org.mesp.MeSPTrainer"
        private var overnight: String { prefix + ".overnight" }
        /// The identifier of the last request for a run that the person started. Each request has a new one.
        private var continued: String?
        /// Whether a handler for the overnight task is registered. A request without a handler crashes the app.
        private var hasOvernight = false

        /// Registers the overnight task. Create the scheduler before the app has launched, because the system may have launched the app for this
        /// task.
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
                // Older SDKs and systems have no such task. With them, the run waits until the app is in front again.
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

        /// Registers a handler.
        ///
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
                // The handler is called on any thread.
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
