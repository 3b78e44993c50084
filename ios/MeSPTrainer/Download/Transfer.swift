import Foundation
import MeSPFiles
import MeSPSentences

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

protocol Transfer: Sendable {
    var filesAtOnce: Int { get }
    /// Receives the missing bytes of the requested file.
    ///
    /// - Throws: `RetryableFailure` if another request may succeed; `FileNotFound` or `MeSPError` if not; `CancellationError`.
    func receive(_ requested: RequestedFile, progress: @escaping @Sendable (_ bytes: Int) -> Void) async throws
        -> HTTPURLResponse
}

struct RetryableFailure: Error {
    let sentence: Sentence
}

struct FileNotFound: SentenceError {
    let sentence: Sentence
}

extension URLRequest {
    /// Whether the request may use expensive networks, such as mobile networks, and networks in Low Data Mode. On Linux always true.
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
