import Foundation

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

/// Sends requests over HTTP, with limits on the size and the duration of a response. Redirects are not followed, because a redirect could send the
/// request's signature to another host. A successful response must state its length and must not be compressed.
protocol HTTPTransport: Sendable {
    /// Sends a request.
    ///
    /// - Throws: `HTTPFailure`; `CancellationError` as soon as the task is cancelled.
    func send(_ request: URLRequest, most: Int, within seconds: Double) async throws -> (Data, status: Int)
}

enum HTTPFailure: Error {
    case unreachable(String)
    case tooSlow, tooLong, unsaidLength
}
