import Foundation
import MeSPFiles
import MeSPSentences

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

/// A transfer of a file over the network.
protocol Transfer: Sendable {
    /// The maximum number of files that are requested at the same time.
    var filesAtOnce: Int { get }
    /// Receives the bytes that the requested file lacks.
    ///
    /// - Throws: `RetryableFailure` if another request may succeed, `MeSPError` if none will, and `CancellationError`.
    func receive(_ requested: RequestedFile, progress: @escaping @Sendable (_ bytes: Int) -> Void) async throws
        -> HTTPURLResponse
}

/// A failure after which another request may succeed.
struct RetryableFailure: Error {
    let sentence: Sentence
}

/// The Hub's response that a file does not exist.
struct FileNotFound: SentenceError {
    let sentence: Sentence
}

extension URLRequest {
    /// Whether the request may use networks that cost extra, as most mobile networks do, or are in Low Data Mode. Foundation on Linux does not
    /// distinguish networks.
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
