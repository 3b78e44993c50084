import Foundation
import MeSPFiles
import MeSPSentences

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

/// Receives files through the system, even while the app is suspended or after it was terminated. All files are requested at once, because the system
/// delays requests that an app makes in the background.
///
/// If a transfer is interrupted, the resume data is saved beside the file, with the extension `.resume`.
public final class BackgroundTransfer: NSObject, Transfer, @unchecked Sendable {
    let filesAtOnce = Int.max

    /// The folder to which the tasks' file names are relative. The app's folders move when the app is updated.
    private let home: URL
    private(set) var session = URLSession.shared
    private let lock = NSLock()
    /// The files that callers wait for, by name; guarded by the lock.
    private var pendingFiles = [String: PendingFile]()
    /// The tasks that earlier processes began; guarded by the lock.
    private var tasksOfBefore: Task<[URLSessionTask], Never>?

    private struct PendingFile {
        let requested: RequestedFile
        let task: URLSessionDownloadTask
        let isResumed: Bool
        let progress: @Sendable (Int) -> Void
        let continuation: CheckedContinuation<HTTPURLResponse, any Error>
    }

    #if canImport(Darwin)
        /// Creates the transfer. The app must create one at each launch, with the same identifier.
        public convenience init(identifier: String) {
            let configuration = URLSessionConfiguration.background(withIdentifier: identifier)
            configuration.sessionSendsLaunchEvents = true
            self.init(configuration)
        }
    #endif

    init(_ configuration: URLSessionConfiguration, home: URL = URL(fileURLWithPath: NSHomeDirectory())) {
        self.home = home
        super.init()
        session = URLSession(configuration: configuration, delegate: self, delegateQueue: nil)
    }

    func receive(_ requested: RequestedFile, progress: @escaping @Sendable (Int) -> Void) async throws
        -> HTTPURLResponse
    {
        let name = name(of: requested.file)
        let (task, isResumed) = await task(for: requested, name)
        do {
            return try await withTaskCancellationHandler {
                try await withCheckedThrowingContinuation { continuation in
                    let pendingFile = PendingFile(
                        requested: requested, task: task, isResumed: isResumed, progress: progress,
                        continuation: continuation)
                    lock.withLock { pendingFiles[name] = pendingFile }
                    if task.state == .suspended { task.resume() }
                    // The task may have ended before this call.
                    if isResumed && task.state == .completed || Task.isCancelled {
                        end(task, .failure(URLError(.cancelled)))
                    }
                }
            } onCancel: {
                task.cancel { [self] in keep($0, for: task) }
            }
        } catch {
            try Task.checkCancellation()
            throw error
        }
    }

    /// Finds or creates the task for a file.
    ///
    /// - Returns: the task, and whether it resumes an earlier transfer.
    private func task(for requested: RequestedFile, _ name: String) async -> (URLSessionDownloadTask, Bool) {
        for task in await findTasksOfBefore()
        where task.taskDescription == name && (task.state == .running || task.state == .suspended) {
            if let task = task as? URLSessionDownloadTask, let begun = task.originalRequest,
                begun.url == requested.request.url, begun.usesAnyNetwork == requested.request.usesAnyNetwork
            {
                return (task, true)
            }
            task.cancel()  // a task for another commit or other networks
        }
        let resumeFile = requested.file.appendingPathExtension(Self.resume)
        let resumeData = (try? openRegularFile(resumeFile, O_RDONLY)).flatMap {
            try? FileHandle(fileDescriptor: $0, closeOnDealloc: true).readToEnd()
        }
        try? FileManager.default.removeItem(at: resumeFile)  // resume data works once
        var resumed = resumeData.map(session.downloadTask(withResumeData:))
        // A resumed task uses the networks that were allowed when it began.
        if let begun = resumed, begun.originalRequest?.usesAnyNetwork != requested.request.usesAnyNetwork {
            begun.cancel()
            resumed = nil
        }
        let task = resumed ?? session.downloadTask(with: requested.request)
        task.taskDescription = name
        return (task, resumed != nil)
    }

    /// Returns the tasks that earlier processes began. The system is asked only once.
    private func findTasksOfBefore() async -> [URLSessionTask] {
        let search = lock.withLock {
            let search =
                tasksOfBefore
                ?? Task { [session] in
                    await withCheckedContinuation { found in session.getAllTasks { found.resume(returning: $0) } }
                }
            tasksOfBefore = search
            return search
        }
        return await search.value
    }

    // MARK: - Files

    private static let resume = "resume"

    private func name(of file: URL) -> String {
        let folder = home.path + "/"
        return file.path.hasPrefix(folder) ? String(file.path.dropFirst(folder.count)) : file.path
    }

    private func file(of task: URLSessionTask) -> URL? {
        task.taskDescription.map { URL(fileURLWithPath: $0, relativeTo: home).absoluteURL }
    }

    private func keep(_ resumeData: Data?, for task: URLSessionTask) {
        guard let resumeData, let file = file(of: task) else { return }
        // Without resume data, the file is requested again from its beginning.
        try? writeWhole(file.appendingPathExtension(Self.resume)) { try $0.write(contentsOf: resumeData) }
    }

    // MARK: - Callers

    private func findPendingFile(of task: URLSessionTask) -> PendingFile? {
        lock.withLock { task.taskDescription.flatMap { pendingFiles[$0] } }.flatMap { $0.task == task ? $0 : nil }
    }

    private func end(_ task: URLSessionTask, _ result: Result<Void, any Error>) {
        guard let pendingFile = findPendingFile(of: task), let name = task.taskDescription,
            lock.withLock({ pendingFiles.removeValue(forKey: name) }) != nil
        else { return }
        pendingFile.continuation.resume(
            with: Result {
                do { try result.get() } catch let error as URLError { throw pendingFile.requested.brokenOff(error) }
                // A resumed transfer can fail because the system has deleted the partial file.
                if let response = task.response as? HTTPURLResponse, pendingFile.isResumed {
                    guard Self.isTaken(response) else {
                        throw RetryableFailure(sentence: "\(pendingFile.requested.what) could not continue; try again.")
                    }
                    return response
                }
                return try pendingFile.requested.check(task.response, offset: 0).answer
            })
    }

    /// Returns whether a response delivers the file, or with status 206 the rest of the file.
    private static func isTaken(_ response: URLResponse) -> Bool {
        [200, 206].contains((response as? HTTPURLResponse)?.statusCode)
    }
}

extension BackgroundTransfer: URLSessionDownloadDelegate {
    public func urlSession(
        _: URLSession, downloadTask task: URLSessionDownloadTask, didWriteData _: Int64,
        totalBytesWritten written: Int64, totalBytesExpectedToWrite _: Int64
    ) {
        // Foundation on Linux sets the response only at the end.
        guard let pendingFile = findPendingFile(of: task), task.response.map(Self.isTaken) ?? true else { return }
        pendingFile.progress(Int(written))
        if isTooLong(task, Int(written)) { task.cancel() }
    }

    private func isTooLong(_ task: URLSessionTask, _ bytes: Int) -> Bool {
        guard let pendingFile = findPendingFile(of: task), bytes > pendingFile.requested.limit else { return false }
        end(task, .failure(pendingFile.requested.isTooLong))
        return true
    }

    /// Moves the received file into place. The system deletes `location` when this function returns.
    public func urlSession(
        _: URLSession, downloadTask task: URLSessionDownloadTask, didFinishDownloadingTo location: URL
    ) {
        guard let file = file(of: task), let response = task.response, Self.isTaken(response) else { return }
        do {
            let size = try FileManager.default.attributesOfItem(atPath: location.path)[.size] as? Int ?? 0
            if isTooLong(task, size) { return }
            try? FileManager.default.removeItem(at: file)
            try FileManager.default.moveItem(at: location, to: file)
            try? FileManager.default.removeItem(at: file.appendingPathExtension(Self.resume))
        } catch {
            let what = findPendingFile(of: task)?.requested.what ?? "\(file.lastPathComponent)"
            end(task, .failure(MeSPError("\(what) cannot be written: \(error.plainSentence).")))
        }
    }

    public func urlSession(_: URLSession, task: URLSessionTask, didCompleteWithError error: (any Error)?) {
        if let error = error as? URLError {
            #if canImport(Darwin)
                keep(error.downloadTaskResumeData, for: task)
            #endif
            end(task, .failure(error))
        } else {
            end(task, error.map { .failure(URLError(.unknown, userInfo: [NSUnderlyingErrorKey: $0])) } ?? .success(()))
        }
    }
}
