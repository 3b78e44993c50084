import Foundation

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

/// Sends requests over HTTP and bounds what a server can do with the answers: their length, their duration, and where they come from. A
/// redirect is the answer, and is not followed: it would take the request's signature to another host. An answer says its length before it
/// comes, and is not compressed: a megabyte can stand for a gigabyte, and what follows the last chunk has no end.
final class HTTPTransport: Sendable {
    private let session: URLSession
    private let exchanges = Exchanges()

    init(configuration: URLSessionConfiguration) {
        session = URLSession(configuration: configuration, delegate: exchanges, delegateQueue: nil)
    }

    deinit { session.finishTasksAndInvalidate() }

    /// Makes a transport that does not wait for this one: Foundation for Linux can hang in an answer.
    func another() -> HTTPTransport { HTTPTransport(configuration: session.configuration) }

    enum Failure: Error {
        case unreachable(String)
        case tooSlow, tooLong, unsaidLength
    }

    /// Sends a request, and returns the answer's body and status.
    ///
    /// - Parameters:
    ///   - most: the most bytes of a body
    ///   - seconds: until when the answer must be whole
    /// - Throws: `Failure`; `CancellationError` at once where the task is cancelled
    func send(_ request: URLRequest, most: Int, within seconds: Double) async throws -> (Data, status: Int) {
        let task = session.dataTask(with: request)
        let late = DispatchWorkItem { [exchanges] in
            exchanges.end(task, .failure(Failure.tooSlow))
        }
        defer { late.cancel() }
        return try await withTaskCancellationHandler {
            try await withCheckedThrowingContinuation { continuation in
                exchanges.begin(task, most, continuation)
                DispatchQueue.global().asyncAfter(deadline: .now() + seconds, execute: late)
                if Task.isCancelled { exchanges.end(task, .failure(CancellationError())) } else { task.resume() }
            }
        } onCancel: {
            exchanges.end(task, .failure(CancellationError()))
        }
    }

    /// The requests that wait for their answers. Whatever comes first ends one: the answer, its time, or its task's cancellation.
    private final class Exchanges: NSObject, URLSessionDataDelegate, @unchecked Sendable {
        private struct Exchange {
            let continuation: CheckedContinuation<(Data, status: Int), any Error>
            let most: Int
            private(set) var data = Data()

            /// Takes the next bytes of the answer, and returns whether it is still short enough.
            mutating func append(_ bytes: Data) -> Bool {
                guard data.count + bytes.count <= most else { return false }
                data.append(bytes)
                return true
            }
        }
        private let lock = NSLock()
        private var waiting = [Int: Exchange]()

        func begin(
            _ task: URLSessionTask, _ most: Int, _ continuation: CheckedContinuation<(Data, status: Int), any Error>
        ) {
            lock.withLock { waiting[task.taskIdentifier] = Exchange(continuation: continuation, most: most) }
        }

        func end(_ task: URLSessionTask, _ result: Result<Void, any Error>) {
            guard let exchange = lock.withLock({ waiting.removeValue(forKey: task.taskIdentifier) }) else { return }
            exchange.continuation.resume(
                with: result.flatMap {
                    guard let response = task.response as? HTTPURLResponse else {
                        return .failure(Failure.unreachable("no answer"))
                    }
                    return .success((exchange.data, response.statusCode))
                })
            if case .failure = result { stop(task) }
        }

        private func stop(_ task: URLSessionTask) {
            #if canImport(FoundationNetworking)
                // Foundation for Linux can crash where a task is cancelled. Suspended, it reads no more.
                task.suspend()
            #else
                task.cancel()
            #endif
        }

        func urlSession(
            _ session: URLSession, dataTask: URLSessionDataTask, didReceive response: URLResponse,
            completionHandler: @escaping @Sendable (URLSession.ResponseDisposition) -> Void
        ) {
            let most = lock.withLock { waiting[dataTask.taskIdentifier]?.most } ?? 0
            let response = response as? HTTPURLResponse
            let isCoded = ["content-encoding", "transfer-encoding"].contains {
                response?.value(forHTTPHeaderField: $0).map { $0.lowercased() != "identity" } ?? false
            }
            let length = isCoded ? -1 : response?.expectedContentLength ?? -1
            if length > Int64(most) { end(dataTask, .failure(Failure.tooLong)) }
            if length < 0 {
                // Of an error, which may be a proxy's, the status tells enough.
                let isError = (response?.statusCode ?? 0) >= 400
                end(dataTask, isError ? .success(()) : .failure(Failure.unsaidLength))
                if isError { stop(dataTask) }
            }
            completionHandler(.allow)
        }

        func urlSession(_ session: URLSession, dataTask: URLSessionDataTask, didReceive data: Data) {
            let isTooLong = lock.withLock {
                // No copy of the exchange: appending would copy all data so far.
                waiting[dataTask.taskIdentifier]?.append(data) == false
            }
            if isTooLong { end(dataTask, .failure(Failure.tooLong)) }
        }

        func urlSession(_ session: URLSession, task: URLSessionTask, didCompleteWithError error: (any Error)?) {
            end(task, error.map { .failure(Failure.unreachable($0.localizedDescription)) } ?? .success(()))
        }

        func urlSession(
            _ session: URLSession, task: URLSessionTask, willPerformHTTPRedirection response: HTTPURLResponse,
            newRequest request: URLRequest, completionHandler: @escaping @Sendable (URLRequest?) -> Void
        ) {
            completionHandler(nil)
        }
    }
}
