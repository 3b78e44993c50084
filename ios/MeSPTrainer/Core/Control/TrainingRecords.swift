/// The records of a run as it writes them: what `RunController.train(_:)` gives.
///
/// Cancelling the task that waits for a record, or dropping the iterator, stops the run as `stop()` does. A cancelled loop continues
/// until the adapters are saved; its last record is then `end` with the reason `stopped`.
public struct TrainingRecords: AsyncSequence, Sendable {
    public typealias Element = LogRecord

    let mailbox: Mailbox
    let stop: @Sendable () -> Void

    public func makeAsyncIterator() -> Iterator { Iterator(mailbox: mailbox, stop: stop) }

    public final class Iterator: AsyncIteratorProtocol, Sendable {
        private let mailbox: Mailbox
        private let stop: @Sendable () -> Void

        init(mailbox: Mailbox, stop: @escaping @Sendable () -> Void) {
            (self.mailbox, self.stop) = (mailbox, stop)
        }

        deinit { stop() }

        /// - Throws: `MeSPError`, where the run fails.
        public func next() async throws -> LogRecord? {
            try await withTaskCancellationHandler {
                try await mailbox.next()
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
    public func train(_ settings: RunSettings) throws -> TrainingRecords {
        guard !isRunning else { throw MeSPError("A run is in progress; stop it first.") }
        let mailbox = Mailbox()
        return TrainingRecords(mailbox: mailbox, stop: start(settings, mailbox: mailbox))
    }
}

/// Keeps records until they are taken. An `AsyncStream` ends when its consumer is cancelled, and would lose those of a run's end.
actor Mailbox {
    private var records = [LogRecord]()
    private var ending: Result<LogRecord?, any Error>?
    private var waiting: CheckedContinuation<LogRecord?, any Error>?

    func put(_ record: LogRecord) {
        if let waiting {
            self.waiting = nil
            waiting.resume(returning: record)
        } else {
            records.append(record)
        }
    }

    /// After this and the records that are there, `next()` returns nil, or throws `error` first.
    func end(_ error: MeSPError?) {
        let ending: Result<LogRecord?, any Error> = error.map { .failure($0) } ?? .success(nil)
        guard let waiting else {
            self.ending = ending
            return
        }
        (self.waiting, self.ending) = (nil, .success(nil))
        waiting.resume(with: ending)
    }

    func next() async throws -> LogRecord? {
        if !records.isEmpty { return records.removeFirst() }
        if let ending {
            self.ending = .success(nil)
            return try ending.get()
        }
        return try await withCheckedThrowingContinuation { waiting = $0 }
    }
}
