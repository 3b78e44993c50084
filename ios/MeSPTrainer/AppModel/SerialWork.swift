import Foundation

actor SerialWork {
    private var isRunning = false

    /// Waits until no other work is running, then runs `body` in a detached task. Cancelling the caller cancels the wait or that task.
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
