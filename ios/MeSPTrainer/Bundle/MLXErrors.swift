import Foundation
import MLX
import MeSPSentences

/// Collects the errors of MLX during work, and repeats work that failed. The trainer reads values from MLX through the functions in this file.
///
/// MLX's functions do not throw: mlx-swift passes an error to the current handler and returns. Then `eval` has computed nothing, `item()` is 0, and
/// `asData` reads through a null pointer. An error of a GPU can come later than the work that failed: `eval` returns, and its arrays count as
/// evaluated but hold garbage. MLX reports the error once, when the stream is synchronized or more work is encoded. So a value is used only after it
/// is confirmed: the stream has been synchronized, and no error was found. Failed work is repeated from arrays that were confirmed.
package enum MLXErrors {
    /// Work whose errors are collected.
    private struct Work: Sendable {
        let errors: ErrorBox
        /// The stream of a GPU; nil on a CPU, which reports errors before a function returns.
        let stream: MLX.Stream?
        /// Whether the work is repeated if it fails.
        let isRepeated: Bool
        let failures: Failures
    }

    /// MLX's messages of the failures after which work was repeated.
    private final class Failures: @unchecked Sendable {
        private let lock = NSLock()
        private var messages = [String]()

        func add(_ message: String) { lock.withLock { messages.append(message) } }

        func take() -> [String] {
            lock.withLock {
                defer { messages = [] }
                return messages
            }
        }
    }

    @TaskLocal private static var work: Work?

    /// The number of failures after which work is given up.
    private static let most = 3
    /// The number of times that iOS may refuse work in the background without a failure being counted, and the seconds before the next attempt.
    private static let (mostRefusals, secondsOfRefusal) = (60, 1.0)

    /// Calls `body` and collects MLX's errors in it. A nested call on the same stream is part of the outer work.
    ///
    /// - Parameter stream: the stream of a GPU; nil for a CPU.
    /// - Throws: `MeSPError` with the first error of MLX, or `MLXFailure` in a nested call; if MLX had no error, the error of `body`.
    package static func collect<R>(on stream: MLX.Stream? = nil, _ body: () throws -> R) throws -> R {
        if let work, work.stream == stream { return try confirmed(body) }
        do {
            return try collect(stream, isRepeated: false, Failures(), body)
        } catch let failure as MLXFailure {
            throw MeSPError(failure.sentence)
        }
    }

    private static func collect<R>(
        _ stream: MLX.Stream?, isRepeated: Bool, _ failures: Failures, _ body: () throws -> R
    ) throws -> R {
        // `confirm()` has already thrown what `withError` would throw at its end.
        try withError { errors in
            let work = Work(errors: errors, stream: stream, isRepeated: isRepeated, failures: failures)
            return try $work.withValue(work) { try confirmed(body) }
        }
    }

    /// Calls `body` and confirms its result. An error of MLX takes precedence over the error that `body` throws, because it is the cause.
    private static func confirmed<R>(_ body: () throws -> R) throws -> R {
        let result = Result { try body() }
        try confirm()
        return try result.get()
    }

    /// Waits for the GPU to complete its work, and checks for errors.
    ///
    /// - Throws: `MLXFailure` if MLX has failed since `collect` or `repeating` began.
    package static func confirm() throws {
        work?.stream?.synchronize()
        try check()
    }

    /// - Throws: `MLXFailure` if MLX has reported an error since `collect` or `repeating` began. A GPU may report an error later: see `confirm`.
    package static func check() throws {
        guard let work, let error = work.errors.firstError else { return }
        // Running kernels write into the caller's arrays, so the GPU must finish before these arrays are freed. An error during the wait belongs to
        // the work that has already failed.
        if let stream = work.stream { try? withError { stream.synchronize() } }
        throw MLXFailure(error)
    }

    /// Calls `body` and confirms its results. On a GPU, calls `body` again if MLX fails.
    ///
    /// All arrays that `body` reads must have been confirmed before. An array that is evaluated only in failed work would hold garbage in the next
    /// attempt. `body` must not change what it reads, because no result of failed work may be read. A nested call is part of the outer repeated work.
    /// - Parameter beforeRetry: a closure to call before `body` is called again. The closure may wait, or throw an error.
    /// - Throws: `MLXFailure`, with `isFinal` set, after three failures on a GPU; otherwise the error of `body` or of `beforeRetry`.
    package static func repeating<R>(beforeRetry: () throws -> Void = {}, _ body: () throws -> R) throws -> R {
        guard let work, let stream = work.stream, !work.isRepeated else { return try body() }
        // Errors of earlier work are reported before this work begins.
        try confirm()
        var (failures, refusals) = (0, 0)
        while true {
            do {
                return try collect(stream, isRepeated: true, work.failures, body)
            } catch var failure as MLXFailure {
                if failure.isRefusal, refusals < mostRefusals {
                    refusals += 1
                    Thread.sleep(forTimeInterval: secondsOfRefusal)
                } else {
                    failures += 1
                }
                if failures == most {
                    failure.isFinal = true
                    throw failure
                }
                work.failures.add(failure.message)
                try beforeRetry()
            }
        }
    }

    /// Returns `value`, which repeated work changes, so that the caller can restore it; nil on a CPU, where no work is repeated.
    package static func held<T>(_ value: T) -> T? { work?.stream == nil ? nil : value }

    /// On a GPU, evaluates `arrays`, which repeated work creates for later work. On a CPU the later work evaluates them.
    package static func evaluateOnGPU(_ arrays: [MLXArray]) { if work?.stream != nil { eval(arrays) } }

    /// Returns MLX's messages of the failures that `repeating` has survived since the last call.
    package static func takeFailures() -> [String] { work?.failures.take() ?? [] }
}

/// An error of MLX.
package struct MLXFailure: SentenceError {
    /// MLX's message without a full stop.
    package let message: String
    /// Whether the work failed so often that it is not repeated again.
    package fileprivate(set) var isFinal = false

    fileprivate init(_ error: any Error) {
        // mlx-c appends the place in its sources where it caught the error.
        message = error.localizedDescription.replacing(#/ at /\S+:[0-9]+$/#, with: "").replacing(#/\.+$/#, with: "")
    }

    /// Whether iOS refused the GPU because the app is in the background.
    var isRefusal: Bool { message.contains("BackgroundExecutionNotPermitted") }

    /// Whether memory was too short.
    package var isOfMemory: Bool {
        ["ErrorOutOfMemory", "Unable to allocate", "Insufficient Memory"].contains(where: message.contains)
    }

    package var sentence: Sentence {
        guard isFinal else { return "\(message)." }
        if isRefusal { return "iOS refuses the GPU to an app that is not in front; open the app and resume." }
        return "The GPU has failed three times at the same work: \(message); restart the device and try again."
    }
}

extension MLXArray {
    /// Returns the element of an array of one element.
    /// - Throws: `MLXFailure` if MLX cannot compute the array.
    package func number<T: HasDType>(_ type: T.Type) throws -> T {
        let number = item(type)
        try MLXErrors.confirm()
        return number
    }

    /// Returns the elements in their order.
    /// - Throws: `MLXFailure` if MLX cannot compute the array.
    package func numbers<T: HasDType>(_ type: T.Type) throws -> [T] {
        let array = asType(T.dtype)
        try array.compute()
        return array.asArray(type)
    }

    /// Calls `body` with the bytes of the elements in their order. The bytes are not copied if the array is contiguous.
    /// - Throws: `MLXFailure` if MLX cannot compute the array; also the errors of `body`.
    package func withBytes<R>(_ body: (Data) throws -> R) throws -> R {
        try compute()
        return try withExtendedLifetime(self) { try body(asData(access: .noCopyIfContiguous).data) }
    }

    /// Evaluates the array.
    /// - Throws: `MLXFailure` if MLX cannot compute the array.
    package func compute() throws {
        eval()
        try MLXErrors.confirm()
    }
}

/// Returns the result of `body`. If `body` throws an error, throws a sentence with the error's reason. Rethrows `MLXFailure` unchanged, because the
/// failed work may be repeated.
package func explaining<R>(_ body: () throws -> R, as sentence: (_ reason: Sentence) -> Sentence) throws -> R {
    do {
        return try body()
    } catch let failure as MLXFailure {
        throw failure
    } catch {
        throw MeSPError(sentence(error.plainSentence))
    }
}
