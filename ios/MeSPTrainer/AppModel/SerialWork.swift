import Foundation

/// Runs work in the background, one piece at a time.
actor SerialWork {
    private var isRunning = false

    /// Waits until no other work is running, then runs `body`. Cancelling the caller's task ends the wait, or cancels the task of `body`.
    func run(_ body: @escaping @Sendable () throws -> Void) async throws {
        while isRunning { try await Task.sleep(for: .milliseconds(50)) }
        isRunning = true
        defer { isRunning = false }
        let work = Task.detached(operation: body)
        try await withTaskCancellationHandler {
            try await work.value
        } onCancel: {
            work.cancel()
        }
    }
}
