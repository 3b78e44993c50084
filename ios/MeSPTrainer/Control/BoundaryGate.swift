import Foundation
import MLX
import MeSPCore

/// A gate at the boundaries of blocks. A thread that works block by block waits at it while there is a reason to pause.
package final class BoundaryGate: @unchecked Sendable {
    private let condition = NSCondition()
    private var reasons = Set<PauseReason>()
    private var stopped = false
    private var isAbandoned = false
    private var memoryWarned = false
    private var lastBattery: Battery?
    /// Whether the thread waits here, or there is none.
    private var isAtRest = true {
        didSet {
            if isAtRest != oldValue { isAtRest ? atWork.leave() : atWork.enter() }
        }
    }
    /// Holds the thread while it is not at rest. A wait for a group goes by a clock that nobody can set; a wait for a condition does not.
    private let atWork = DispatchGroup()
    private var passes = 0

    package init() {}

    /// The number of boundaries that the thread has passed: of blocks, of parts of the head, and in a GPU's first step of parts of blocks.
    package var boundaries: Int { condition.withLock { passes } }

    package func set(_ reasons: Set<PauseReason>) {
        condition.withLock {
            self.reasons = reasons
            condition.broadcast()
        }
    }

    /// The last known value, for the thread.
    package var battery: Battery? {
        get { condition.withLock { lastBattery } }
        set { condition.withLock { lastBattery = newValue } }
    }

    package func warnOfMemory() { condition.withLock { memoryWarned = true } }

    /// Whether there was a memory warning since the last call.
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

    /// Stops work of which nothing has to be finished. It ends also while it waits at the gate, and stopped work does not.
    package func abandon() {
        condition.withLock {
            (stopped, isAbandoned) = (true, true)
            condition.broadcast()
        }
    }

    /// Waits while there is a reason to pause. Calls `tell` with the reason, with each reason that follows it, and with nil at the end.
    package func pass(tell: (PauseReason?) throws -> Void) throws {
        if let first = next(after: nil) {
            // iOS first ends apps that hold memory while they do nothing.
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
        if condition.withLock({ stopped }) { throw CancellationError() }
    }

    /// The present reason to wait, as soon as it is not `told`.
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

    /// A stopped run does not pause, but a step whose updates have begun has to finish, which is impossible in the background, and while the
    /// app uses MLX.
    private var reason: PauseReason? {
        let counted = isAbandoned ? [] : stopped ? reasons.intersection([.away, .app]) : reasons
        return PauseReason.allCases.first { counted.contains($0) }
    }

    /// Runs `body`, which calls `pass` at each boundary, on the thread for work on MLX.
    ///
    /// - Returns: what `body` sends, until it ends or throws. The thread does not wait for a reader.
    package func start<Message: Sendable>(
        _ name: String, sending: Message.Type,
        _ body: @escaping @Sendable (_ send: @escaping @Sendable (Message) -> Void) throws -> Void
    ) -> AsyncThrowingStream<Message, any Error> {
        condition.withLock { isAtRest = false }
        let (messages, sender) = AsyncThrowingStream.makeStream(of: Message.self)
        MLXWork.start(name) { [self] in
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

    /// Returns when the thread waits at a boundary, or there is none.
    package func restBegins() async {
        await withCheckedContinuation { rest in atWork.notify(queue: .global()) { rest.resume() } }
    }

    package func waitUntilAtRest(seconds: Double) { _ = atWork.wait(timeout: .now() + seconds) }

    /// Pauses work while the app is not in front. For work that has no time in the background.
    @MainActor package func pauseUnlessInFront(_ monitor: any DeviceMonitor) {
        set(monitor.scene == .active ? [] : [.away])
        // iOS may refuse the GPU after this call.
        if monitor.scene == .background { waitUntilAtRest(seconds: RunController.secondsToLeave) }
    }
}
