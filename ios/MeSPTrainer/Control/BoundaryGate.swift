import Foundation
import MLX
import MeSPBundle
import MeSPCore

/// A gate between blocks. A thread that works block by block waits at the gate while there is a reason to pause.
package final class BoundaryGate: @unchecked Sendable {
    /// The maximum time in seconds to wait for the block in progress when the app enters the background. iOS allows about five seconds.
    @TaskLocal package static var secondsToLeave = 3.0

    private let condition = NSCondition()
    private var reasons = Set<PauseReason>()
    private var isWithdrawn = false
    private var stopped = false
    private var isAbandoned = false
    private var memoryWarned = false
    private var lastBattery: Battery?
    /// Whether no work is in progress: the thread waits at the gate, has ended, or was not started.
    private var isAtRest = true {
        didSet {
            if isAtRest != oldValue { isAtRest ? atWork.leave() : atWork.enter() }
        }
    }
    /// A group that is entered while the thread works. Unlike the timeout of an `NSCondition`, its timeout does not depend on the wall clock, which
    /// the person can set.
    private let atWork = DispatchGroup()
    private var passes = 0

    package init() {}

    package var boundaries: Int { condition.withLock { passes } }

    /// - Parameter isWithdrawn: whether iOS may refuse the GPU to this work, which uses it.
    package func set(_ reasons: Set<PauseReason>, isWithdrawn: Bool = false) {
        condition.withLock {
            (self.reasons, self.isWithdrawn) = (reasons, isWithdrawn)
            condition.broadcast()
        }
    }

    package var battery: Battery? {
        get { condition.withLock { lastBattery } }
        set { condition.withLock { lastBattery = newValue } }
    }

    package func warnOfMemory() { condition.withLock { memoryWarned = true } }

    package func takeMemoryWarning() -> Bool {
        condition.withLock {
            defer { memoryWarned = false }
            return memoryWarned
        }
    }

    package func stop() {
        condition.withLock {
            stopped = true
            condition.broadcast()
        }
    }

    /// Stops work whose results are not needed. Unlike stopped work, abandoned work ignores all reasons to pause.
    package func abandon() {
        condition.withLock {
            (stopped, isAbandoned) = (true, true)
            condition.broadcast()
        }
    }

    /// Waits while there is a reason to pause. Calls `tell` with each reason, and with nil when the pause ends.
    ///
    /// - Throws: `CancellationError` if the work was stopped, `GPUWithdrawn` if it may not use the GPU to end, or an error of `tell`.
    package func pass(tell: (PauseReason?) throws -> Void) throws {
        if let first = next(after: nil) {
            // If memory is short, iOS first terminates the idle apps that hold the most, so the thread frees memory before it waits.
            Memory.clearCache()
            try MLXLimits.giveBack {
                var reason = first
                try tell(reason)
                while let other = next(after: reason) {
                    try tell(other)
                    reason = other
                }
            }
            try tell(nil)
        }
        try condition.withLock {
            guard stopped else { return }
            throw isWithdrawn && !isAbandoned ? GPUWithdrawn() : CancellationError()
        }
    }

    /// Waits while the reason to pause is `told`. Returns the new reason, or nil if there is none. With nil for `told`, returns immediately.
    private func next(after told: PauseReason?) -> PauseReason? {
        condition.withLock {
            while let told, reason == told {
                isAtRest = true
                condition.wait()
            }
            isAtRest = false
            if reason == nil { passes += 1 }
            return reason
        }
    }

    /// The first reason to pause, or nil. Stopped work still waits for `app`, because it may have to finish a step that has begun its updates.
    /// Abandoned work does not wait.
    private var reason: PauseReason? {
        let counted = isAbandoned ? [] : stopped ? reasons.intersection([.app]) : reasons
        return PauseReason.allCases.first { counted.contains($0) }
    }

    /// Runs `body` on the thread for work with MLX. `body` calls `pass` before its first work with MLX, and at each boundary.
    package func start<Message: Sendable>(
        _ name: String, sending: Message.Type, isUrgent: Bool = true,
        _ body: @escaping @Sendable (_ send: @escaping @Sendable (Message) -> Void) throws -> Void
    ) -> AsyncThrowingStream<Message, any Error> {
        condition.withLock { isAtRest = false }
        let (messages, sender) = AsyncThrowingStream.makeStream(of: Message.self)
        MLXWork.start(name, isUrgent: isUrgent) { [self] in
            do {
                try body { sender.yield($0) }
                sender.finish()
            } catch {
                sender.finish(throwing: error)
            }
            condition.withLock { isAtRest = true }
        }
        return messages
    }

    package func restBegins() async {
        await withCheckedContinuation { rest in atWork.notify(queue: .global()) { rest.resume() } }
    }

    package func waitUntilAtRest(seconds: Double) { _ = atWork.wait(timeout: .now() + seconds) }

    /// Makes work wait if the app is not active, and lets it continue if the app is active. Call this at each change of the scene, for work without
    /// background time.
    @MainActor package func pauseUnlessInFront(_ monitor: any DeviceMonitor) {
        set(monitor.scene == .active ? [] : [.away])
        // iOS may refuse the GPU once this call returns.
        if monitor.scene == .background { waitUntilAtRest(seconds: Self.secondsToLeave) }
    }
}
