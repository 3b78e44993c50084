#if os(iOS)
    @preconcurrency import BackgroundTasks
    import Foundation
    import MeSPAppModel

    @MainActor final class SystemBackground: BackgroundScheduler {
        private(set) static weak var current: SystemBackground?

        var onGrant: ((any BackgroundTime) -> Void)?

        /// Whether background tasks may use the GPU. This needs iOS 26, the entitlement *Background GPU Access* and a device that supports it.
        var givesGPU: Bool {
            #if compiler(>=6.2)
                if #available(iOS 26.0, *) { return BGTaskScheduler.supportedResources.contains(.gpu) }
            #endif
            return false
        }

        private let prefix = Bundle.main.bundleIdentifier ?? "org.mesp.MeSPTrainer"
        private var overnight: String { prefix + ".overnight" }
        /// The identifier of the last request for a continued run. Each request needs a new identifier.
        private var continued: String?
        /// Whether a handler for the overnight task is registered. A request without a handler crashes the app.
        private var hasOvernight = false

        /// Registers the overnight task. This must happen before the app has launched, because the system may launch the app for this task.
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
                // Older SDKs and systems have no continued processing task.
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

        /// Returns whether the handler is registered. Registration fails for an identifier that Info.plist does not permit.
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
                // The system may call the handler on any thread.
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
