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
    /// Receives the bytes that the requested file lacks.
    ///
    /// - Throws: `RetryableFailure` where another request may do better, `MeSPError` where none will, `CancellationError`.
    func receive(_ requested: RequestedFile, progress: @escaping @Sendable (_ bytes: Int) -> Void) async throws
        -> HTTPURLResponse
}

/// A failure after which another request may succeed.
struct RetryableFailure: Error {
    let sentence: Sentence
}

/// The Hub's answer that there is no such file.
struct FileNotFound: SentenceError {
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
