import Foundation
import MeSPFiles
import MeSPSentences

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

/// A transfer of a file over the network.
protocol Transfer: Sendable {
    /// The number of files that may be requested before one has arrived.
    var filesAtOnce: Int { get }
    /// Receives what the wanted file lacks.
    ///
    /// - Throws: `Retryable` where another request may do better, `MeSPError` where none will, `CancellationError`.
    func receive(_ wanted: Wanted, progress: @escaping @Sendable (_ bytes: Int) -> Void) async throws -> HTTPURLResponse
}

/// A failure that another request may not have.
struct Retryable: Error {
    let sentence: Sentence
}

extension URLRequest {
    /// Whether it may use networks that cost extra, as most mobile ones, and those in Low Data Mode. Foundation for Linux knows of none.
    var usesAnyNetwork: Bool {
        get {
            #if canImport(Darwin)
                allowsExpensiveNetworkAccess && allowsConstrainedNetworkAccess
            #else
                true
            #endif
        }
        set {
            #if canImport(Darwin)
                (allowsExpensiveNetworkAccess, allowsConstrainedNetworkAccess) = (newValue, newValue)
            #endif
        }
    }
}

/// A file of a repository, and where it goes.
struct Wanted: Sendable {
    let request: URLRequest
    /// Gets what comes; perhaps it has the beginning.
    let file: URL
    /// The most bytes that it may have.
    let limit: Int
    let path: String
    let repository: String

    var what: Sentence { "\(path) of \(repository)" }
    var isTooLong: MeSPError { MeSPError("\(what) is longer than its manifest says.") }

    /// - Parameter offset: from which on it was asked for.
    /// - Returns: the answer, and where in the file its body begins.
    func check(_ response: URLResponse?, offset: Int) throws -> (answer: HTTPURLResponse, start: Int) {
        guard let response = response as? HTTPURLResponse else { throw Retryable(sentence: "\(what) gave no answer.") }
        let page = "https://huggingface.co/\(repository)"
        switch response.statusCode {
        case 200: return (response, 0)  // all of it, also where a part was asked for
        case 206:
            let range = response.value(forHTTPHeaderField: "Content-Range") ?? ""
            guard range.hasPrefix("bytes \(offset)-") else {
                throw Retryable(
                    sentence: "The server sent another part of \(what) than was asked for; try again later.")
            }
            return (response, offset)
        case 401, 403:
            // Where the Hub leads to, an address is good for a time.
            guard response.url?.host == request.url?.host else {
                throw Retryable(sentence: "The Hub's address of \(what) is no longer good; try again.")
            }
            throw MeSPError("\(repository) is not open to everybody; see \(page), or take another repository.")
        case 404:
            throw MeSPError(
                "There is no \(what) on the Hub; write the repository as owner/name, of one that holds a bundle.")
        case 416: throw Retryable(sentence: "\(what) is not as long as its manifest says.")
        case 429, 500...599:
            throw Retryable(sentence: "The Hub is busy (\(response.statusCode)); try again later.")
        default: throw MeSPError("The Hub answers \(response.statusCode) for \(what); see \(page).")
        }
    }

    /// The message for a connection that ended.
    func brokenOff(_ error: any Error) -> Retryable {
        #if canImport(Darwin)
            if (error as? URLError)?.networkUnavailableReason != nil {
                return Retryable(
                    sentence:
                        "The network costs extra or is in Low Data Mode, and \(what) does not come over it; connect to another network, or start the download again to decide."
                )
            }
        #endif
        return Retryable(sentence: "\(what) stopped arriving: \(error.plainSentence). Check the network and try again.")
    }
}

/// Receives as long as the process runs, behind what the file has.
struct ForegroundTransfer: Transfer {
    let filesAtOnce = 1

    func receive(_ wanted: Wanted, progress: @escaping @Sendable (Int) -> Void) async throws -> HTTPURLResponse {
        let reception = try Reception(wanted, progress: progress)
        var request = wanted.request
        if reception.offset > 0 { request.setValue("bytes=\(reception.offset)-", forHTTPHeaderField: "Range") }
        let configuration = URLSessionConfiguration.ephemeral
        configuration.timeoutIntervalForRequest = request.timeoutInterval
        let session = URLSession(configuration: configuration, delegate: reception, delegateQueue: nil)
        defer { session.finishTasksAndInvalidate() }
        let task = session.dataTask(with: request)
        return try await withTaskCancellationHandler {
            try await reception.end(of: task)
        } onCancel: {
            task.cancel()
        }
    }
}

/// Takes the answer to one request into a file, behind what that has.
private final class Reception: NSObject, URLSessionDataDelegate, @unchecked Sendable {
    /// The part of the file that was there before.
    let offset: Int
    private let wanted: Wanted
    private let file: FileHandle
    private let progress: @Sendable (Int) -> Void

    // Of the session's queue until the answer has ended.
    private var written: Int
    private var answer: HTTPURLResponse?
    private var failure: (any Error)?
    private var continuation: CheckedContinuation<HTTPURLResponse, any Error>?

    init(_ wanted: Wanted, progress: @escaping @Sendable (Int) -> Void) throws {
        do {
            file = FileHandle(
                fileDescriptor: try openRegularFile(wanted.file, O_WRONLY | O_CREAT), closeOnDealloc: true)
            offset = Int(try file.seekToEnd())
        } catch {
            throw MeSPError("\(wanted.what) cannot be written: \(error.plainSentence).")
        }
        (self.wanted, self.progress) = (wanted, progress)
        written = offset
    }

    /// Starts the task, and waits for its end.
    func end(of task: URLSessionDataTask) async throws -> HTTPURLResponse {
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
            let (answer, start) = try wanted.check(response, offset: offset)
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
        guard written + data.count <= wanted.limit else {
            failure = wanted.isTooLong
            return dataTask.cancel()
        }
        do {
            try file.write(contentsOf: data)
            written += data.count
            progress(written)
        } catch {
            failure = MeSPError("\(wanted.what) cannot be written: \(error.plainSentence).")
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
            result = .failure(isCancelled ? CancellationError() : wanted.brokenOff(error))
        } else if let answer {
            result = .success(answer)
        } else {
            result = .failure(Retryable(sentence: "\(wanted.what) gave no answer."))
        }
        continuation?.resume(with: result)
        continuation = nil
    }
}
