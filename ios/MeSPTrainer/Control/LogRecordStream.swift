import MeSPCore
import MeSPSentences

/// The records of a run as it writes them: what `RunController.train(_:)` gives.
///
/// Cancelling the task that waits for a record, or dropping the iterator, stops the run as `stop()` does. A cancelled loop continues
/// until the adapters are saved; its last record is then `end` with the reason `stopped`.
package struct LogRecordStream: AsyncSequence, Sendable {
    package typealias Element = LogRecord

    let records: AsyncThrowingStream<LogRecord, any Error>
    let stop: @Sendable () -> Void

    package func makeAsyncIterator() -> Iterator { Iterator(records: records, stop: stop) }

    package final class Iterator: AsyncIteratorProtocol, Sendable {
        private let records: AsyncThrowingStream<LogRecord, any Error>
        private let stop: @Sendable () -> Void

        init(records: AsyncThrowingStream<LogRecord, any Error>, stop: @escaping @Sendable () -> Void) {
            (self.records, self.stop) = (records, stop)
        }

        deinit { stop() }

        /// - Throws: `MeSPError`, where the run fails.
        package func next() async throws -> LogRecord? {
            try await withTaskCancellationHandler {
                // In a task of its own, which is not cancelled: the stream would then end, and lose the records of a run's end.
                try await Task { [records] in try await records.first { _ in true } }.value
            } onCancel: {
                stop()
            }
        }
    }
}

extension RunController {
    /// Begins a run and gives its records. One loop may take them.
    ///
    /// - Throws: `MeSPError`, where a run is in progress.
    package func train(_ settings: RunSettings) throws -> LogRecordStream {
        guard !isRunning else { throw MeSPError("A run is in progress; stop it first.") }
        let (records, sender) = AsyncThrowingStream.makeStream(of: LogRecord.self)
        return LogRecordStream(records: records, stop: start(settings, records: sender))
    }
}
