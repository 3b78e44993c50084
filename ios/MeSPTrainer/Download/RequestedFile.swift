import Foundation
import MeSPSentences

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

struct RequestedFile: Sendable {
    let request: URLRequest
    /// The file on the device. It may already hold the first bytes.
    let file: URL
    let limit: Int
    let path: String
    let repository: String

    var what: Sentence { "\(path) of \(repository)" }
    var isTooLong: MeSPError { MeSPError("\(what) is longer than it may be.") }

    /// Checks the response to a request.
    ///
    /// - Parameter offset: the index of the first requested byte.
    /// - Returns: the response, and the index in the file of the first byte of its body.
    func check(_ response: URLResponse?, offset: Int) throws -> (answer: HTTPURLResponse, start: Int) {
        guard let response = response as? HTTPURLResponse else {
            throw RetryableFailure(sentence: "\(what) gave no answer.")
        }
        let page = "https://huggingface.co/\(repository)"
        switch response.statusCode {
        case 200: return (response, 0)  // the whole file, even if a part was requested
        case 206:
            let range = response.value(forHTTPHeaderField: "Content-Range") ?? ""
            guard range.hasPrefix("bytes \(offset)-") else {
                throw RetryableFailure(
                    sentence: "The server sent another part of \(what) than was asked for; try again later.")
            }
            return (response, offset)
        case 401, 403:
            // The Hub redirects to addresses that expire, so this address may have expired.
            guard response.url?.host == request.url?.host else {
                throw RetryableFailure(sentence: "The Hub's address of \(what) is no longer valid; try again.")
            }
            throw MeSPError("\(repository) is not open to everybody; see \(page), or take another repository.")
        case 404:
            throw FileNotFound(
                sentence: "There is no \(what) on the Hub; look the repository up again, or take another.")
        case 416: throw RetryableFailure(sentence: "\(what) is not as long as its repository says.")
        case 429, 500...599:
            throw RetryableFailure(sentence: "The Hub is busy (\(response.statusCode)); try again later.")
        default: throw MeSPError("The Hub answers \(response.statusCode) for \(what); see \(page).")
        }
    }

    func brokenOff(_ error: any Error) -> RetryableFailure {
        #if canImport(Darwin)
            if (error as? URLError)?.networkUnavailableReason != nil {
                return RetryableFailure(
                    sentence:
                        "The network costs extra or is in Low Data Mode, and \(what) does not come over it; connect to another network, or start the download again to decide."
                )
            }
        #endif
        return RetryableFailure(
            sentence: "\(what) stopped arriving: \(error.plainSentence). Check the network and try again.")
    }
}
