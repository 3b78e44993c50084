import Foundation
import MeSPFiles
import MeSPSentences

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

struct ForegroundTransfer: Transfer {
    let filesAtOnce = 1

    func receive(_ requested: RequestedFile, progress: @escaping @Sendable (Int) -> Void) async throws
        -> HTTPURLResponse
    {
        let writer = try ResponseWriter(requested, progress: progress)
        var request = requested.request
        if writer.offset > 0 { request.setValue("bytes=\(writer.offset)-", forHTTPHeaderField: "Range") }
        let configuration = URLSessionConfiguration.ephemeral
        configuration.timeoutIntervalForRequest = request.timeoutInterval
        let session = URLSession(configuration: configuration, delegate: writer, delegateQueue: nil)
        defer { session.finishTasksAndInvalidate() }
        let task = session.dataTask(with: request)
        return try await withTaskCancellationHandler {
            try await writer.run(task)
        } onCancel: {
            task.cancel()
        }
    }
}

private final class ResponseWriter: NSObject, URLSessionDataDelegate, @unchecked Sendable {
    let offset: Int
    private let requested: RequestedFile
    private let file: FileHandle
    private let progress: @Sendable (Int) -> Void

    // After the task has started, these are used only on the session's queue.
    private var written: Int
    private var answer: HTTPURLResponse?
    private var failure: (any Error)?
    private var continuation: CheckedContinuation<HTTPURLResponse, any Error>?

    init(_ requested: RequestedFile, progress: @escaping @Sendable (Int) -> Void) throws {
        do {
            file = FileHandle(
                fileDescriptor: try openRegularFile(requested.file, O_WRONLY | O_CREAT), closeOnDealloc: true)
            offset = Int(try file.seekToEnd())
        } catch {
            throw MeSPError("\(requested.what) cannot be written: \(error.plainSentence).")
        }
        (self.requested, self.progress) = (requested, progress)
        written = offset
    }

    func run(_ task: URLSessionDataTask) async throws -> HTTPURLResponse {
        try await withCheckedThrowingContinuation {
            continuation = $0
            task.resume()
        }
    }

    func urlSession(
        _: URLSession, dataTask: URLSessionDataTask, didReceive response: URLResponse,
        completionHandler: @escaping @Sendable (URLSession.ResponseDisposition) -> Void
    ) {
        do {
            let (answer, start) = try requested.check(response, offset: offset)
            try file.truncate(atOffset: UInt64(start))
            (self.answer, written) = (answer, start)
            completionHandler(.allow)
        } catch {
            if (response as? HTTPURLResponse)?.statusCode == 416 { try? file.truncate(atOffset: 0) }
            failure = error
            completionHandler(.cancel)
        }
    }

    func urlSession(_: URLSession, dataTask: URLSessionDataTask, didReceive data: Data) {
        guard failure == nil else { return }
        guard written + data.count <= requested.limit else {
            failure = requested.isTooLong
            return dataTask.cancel()
        }
        do {
            try file.write(contentsOf: data)
            written += data.count
            progress(written)
        } catch {
            failure = MeSPError("\(requested.what) cannot be written: \(error.plainSentence).")
            dataTask.cancel()
        }
    }

    func urlSession(_: URLSession, task: URLSessionTask, didCompleteWithError error: (any Error)?) {
        try? file.close()
        let result: Result<HTTPURLResponse, any Error>
        if let failure {
            result = .failure(failure)
        } else if let error {
            let isCancelled = (error as? URLError)?.code == .cancelled
            result = .failure(isCancelled ? CancellationError() : requested.brokenOff(error))
        } else if let answer {
            result = .success(answer)
        } else {
            result = .failure(RetryableFailure(sentence: "\(requested.what) gave no answer."))
        }
        continuation?.resume(with: result)
        continuation = nil
    }
}
