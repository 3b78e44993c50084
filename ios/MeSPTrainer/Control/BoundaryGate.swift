import Foundation
import MLX
import MeSPCore

/// A gate at the boundaries of blocks. A thread that works block by block waits at the gate while there is a reason to pause.
package final class BoundaryGate: @unchecked Sendable {
    private let condition = NSCondition()
    private var reasons = Set<PauseReason>()
    private var stopped = false
    private var isAbandoned = false
    private var memoryWarned = false
    private var lastBattery: Battery?
    /// Whether the thread waits at the gate, or there is no thread.
    private var isAtRest = true {
        didSet {
            if isAtRest != oldValue { isAtRest ? atWork.leave() : atWork.enter() }
        }
    }
    /// A group that is entered while the thread works. Waiting for a group with a timeout uses a clock that cannot be set, unlike waiting for a
    /// condition.
    private let atWork = DispatchGroup()
    private var passes = 0

    package init() {}

    /// The number of boundaries that the thread has passed: between blocks, between parts of the head, and, in a GPU's first step, between parts of
    /// blocks.
    package var boundaries: Int { condition.withLock { passes } }

    package func set(_ reasons: Set<PauseReason>) {
        condition.withLock {
            self.reasons = reasons
            condition.broadcast()
        }
    }

    /// The last known state of the battery, which the thread reads; nil if there is no battery, or if its state is unknown.
    package var battery: Battery? {
        get { condition.withLock { lastBattery } }
        set { condition.withLock { lastBattery = newValue } }
    }

    package func warnOfMemory() { condition.withLock { memoryWarned = true } }

    /// Returns whether there was a memory warning since the last call.
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

    /// Stops work whose results are not needed. Unlike stopped work, abandoned work ends even while there is a reason to wait at the gate.
    package func abandon() {
        condition.withLock {
            (stopped, isAbandoned) = (true, true)
            condition.broadcast()
        }
    }

    /// Waits while there is a reason to pause. Calls `tell` with the reason, with each following reason, and with nil at the end.
    package func pass(tell: (PauseReason?) throws -> Void) throws {
        if let first = next(after: nil) {
            // iOS first terminates idle apps that hold memory.
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

    /// Waits until the reason to wait differs from `told`, and returns the new reason; nil if there is no reason to wait.
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

    /// The reason to wait; nil if the thread may continue. A stopped run ignores most reasons. But a step whose updates have begun must finish, which
    /// it cannot do in the background or while the app uses MLX.
    private var reason: PauseReason? {
        let counted = isAbandoned ? [] : stopped ? reasons.intersection([.away, .app]) : reasons
        return PauseReason.allCases.first { counted.contains($0) }
    }

    /// Runs `body`, which calls `pass` at each boundary, on the thread for work on MLX.
    ///
    /// - Returns: the messages that `body` sends, until it ends or throws. The thread does not wait for a reader.
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

    /// Returns when the thread waits at a boundary, or when there is no thread.
    package func restBegins() async {
        await withCheckedContinuation { rest in atWork.notify(queue: .global()) { rest.resume() } }
    }

    package func waitUntilAtRest(seconds: Double) { _ = atWork.wait(timeout: .now() + seconds) }

    /// Pauses work while the app is not active. Use it for work that gets no background time.
    @MainActor package func pauseUnlessInFront(_ monitor: any DeviceMonitor) {
        set(monitor.scene == .active ? [] : [.away])
        // iOS may refuse the GPU after this call.
        if monitor.scene == .background { waitUntilAtRest(seconds: RunController.secondsToLeave) }
    }
}
