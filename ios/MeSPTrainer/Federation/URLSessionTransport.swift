import Foundation

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

/// Sends requests with Foundation's `URLSession`. On Linux only tests use this transport, with simulated servers.
final class URLSessionTransport: HTTPTransport {
    private let session: URLSession
    private let exchanges = Exchanges()

    init(configuration: URLSessionConfiguration) {
        session = URLSession(configuration: configuration, delegate: exchanges, delegateQueue: nil)
    }

    deinit { session.finishTasksAndInvalidate() }

    func send(_ request: URLRequest, most: Int, within seconds: Double) async throws -> (Data, status: Int) {
        let task = session.dataTask(with: request)
        let late = DispatchWorkItem { [exchanges] in
            exchanges.end(task, .failure(HTTPFailure.tooSlow))
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

    private final class Exchanges: NSObject, URLSessionDataDelegate, @unchecked Sendable {
        private struct Exchange {
            let continuation: CheckedContinuation<(Data, status: Int), any Error>
            let most: Int
            private(set) var data = Data()

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
                        return .failure(HTTPFailure.unreachable("no answer"))
                    }
                    return .success((exchange.data, response.statusCode))
                })
            if case .failure = result { stop(task) }
        }

        private func stop(_ task: URLSessionTask) {
            // On Linux, Foundation can crash when a task is cancelled.
            #if !canImport(FoundationNetworking)
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
            if length > Int64(most) { end(dataTask, .failure(HTTPFailure.tooLong)) }
            if length < 0 {
                // An error response without a length is accepted, but its body is not read.
                let isError = (response?.statusCode ?? 0) >= 400
                end(dataTask, isError ? .success(()) : .failure(HTTPFailure.unsaidLength))
                if isError { stop(dataTask) }
            }
            completionHandler(.allow)
        }

        func urlSession(_ session: URLSession, dataTask: URLSessionDataTask, didReceive data: Data) {
            let isTooLong = lock.withLock {
                // The data is appended in place to avoid a copy.
                waiting[dataTask.taskIdentifier]?.append(data) == false
            }
            if isTooLong { end(dataTask, .failure(HTTPFailure.tooLong)) }
        }

        func urlSession(_ session: URLSession, task: URLSessionTask, didCompleteWithError error: (any Error)?) {
            end(task, error.map { .failure(HTTPFailure.unreachable($0.localizedDescription)) } ?? .success(()))
        }

        func urlSession(
            _ session: URLSession, task: URLSessionTask, willPerformHTTPRedirection response: HTTPURLResponse,
            newRequest request: URLRequest, completionHandler: @escaping @Sendable (URLRequest?) -> Void
        ) {
            completionHandler(nil)
        }
    }
}
