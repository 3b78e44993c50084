import Foundation
import MLX
import MeSPSentences

/// The errors of MLX in a stretch of work, and what follows from them. This is the one place through which values leave MLX.
///
/// MLX's functions do not throw: mlx-swift hands an error to the handler in force and returns. Then `eval` has computed nothing,
/// `item()` is 0, and `asData` reads through a null pointer. A GPU's errors can also come later than the work that failed: `eval` returns,
/// its arrays count as evaluated and hold garbage, and the error is thrown, once, when the stream is waited for or more work is encoded.
/// So a value is used only after the stream was waited for and errors were asked for, and what failed is done again from arrays that
/// were confirmed so.
package enum MLXErrors {
    /// Work whose errors are collected.
    private struct Work: Sendable {
        let errors: ErrorBox
        /// The stream of a GPU; nil on a CPU, whose errors are there when a function returns.
        let stream: MLX.Stream?
        /// Whether the work is done again where it fails.
        let isRepeated: Bool
        let failures: Failures
    }

    /// MLX's messages of the failures that were survived.
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

    /// The number of failures with which a piece of work is given up.
    private static let most = 3
    /// How often a piece of work may be refused in the background, and the seconds before the next attempt.
    private static let (mostRefusals, secondsOfRefusal) = (60, 1.0)

    /// Calls `body`, in which errors of MLX are collected. Within other such work on the same stream it is part of that work.
    ///
    /// - Parameter stream: what a GPU computes on; nil for a CPU.
    /// - Throws: `MeSPError` with the first error of MLX, or within other such work `MLXFailure`; without one, the error of `body`.
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

    /// The result of `body`, or the error of MLX that is the cause of the error that it throws.
    private static func confirmed<R>(_ body: () throws -> R) throws -> R {
        let result = Result { try body() }
        try confirm()
        return try result.get()
    }

    /// Waits for a GPU.
    ///
    /// - Throws: `MLXFailure` where MLX has failed since `collect` or `repeating` began.
    package static func confirm() throws {
        work?.stream?.synchronize()
        try check()
    }

    /// - Throws: `MLXFailure` where an error of MLX has come since `collect` or `repeating` began. A GPU's may come later: see `confirm`.
    package static func check() throws {
        guard let work, let error = work.errors.firstError else { return }
        // It is waited for before the caller's arrays go, as running kernels write into them. What fails here is of the same work.
        if let stream = work.stream { try? withError { stream.synchronize() } }
        throw MLXFailure(error)
    }

    /// Calls `body` and confirms what it has computed. On a GPU, where that fails, `body` is called again.
    ///
    /// All that `body` reads must have been confirmed before: what is evaluated only now would be garbage the next time. It must change
    /// nothing that it reads, as nothing of failed work may be read. Within other repeated work it is part of that work.
    /// - Parameter beforeRetry: called before `body` is called again; it may wait, or throw.
    /// - Throws: `MLXFailure` that `isFinal` after three failures, or on a CPU after one; what `body` throws otherwise.
    package static func repeating<R>(beforeRetry: () throws -> Void = {}, _ body: () throws -> R) throws -> R {
        guard let work, let stream = work.stream, !work.isRepeated else { return try body() }
        // An error of what came before is not this work's.
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

    /// What work changes that may be repeated, to be given to it again; nil where nothing is repeated.
    package static func held<T>(_ value: T) -> T? { work?.stream == nil ? nil : value }

    /// Evaluates, on a GPU, arrays that repeated work makes for later work. On a CPU the later work evaluates them.
    package static func evaluateOnGPU(_ arrays: [MLXArray]) { if work?.stream != nil { eval(arrays) } }

    /// Returns MLX's messages of the failures that `repeating` has survived since the last call.
    package static func takeFailures() -> [String] { work?.failures.take() ?? [] }
}

/// An error of MLX.
package struct MLXFailure: SentenceError {
    /// Without a full stop.
    package let message: String
    /// Whether the work has been repeated in vain.
    package fileprivate(set) var isFinal = false

    fileprivate init(_ error: any Error) {
        // mlx-c appends where in its sources the error was caught.
        message = error.localizedDescription.replacing(#/ at /\S+:[0-9]+$/#, with: "").replacing(#/\.+$/#, with: "")
    }

    /// Whether iOS refuses the GPU because the app is not in front.
    var isRefusal: Bool { message.contains("BackgroundExecutionNotPermitted") }

    /// Whether there is too little memory.
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
    /// The element of an array that has one.
    /// - Throws: `MLXFailure` where MLX cannot compute it.
    package func number<T: HasDType>(_ type: T.Type) throws -> T {
        let number = item(type)
        try MLXErrors.confirm()
        return number
    }

    /// The elements in their order.
    /// - Throws: `MLXFailure` where MLX cannot compute them.
    package func numbers<T: HasDType>(_ type: T.Type) throws -> [T] {
        let array = asType(T.dtype)
        try array.compute()
        return array.asArray(type)
    }

    /// Calls `body` with the bytes of the elements in their order, which are the array's own where it is contiguous.
    /// - Throws: `MLXFailure` where MLX cannot compute them, and what `body` throws.
    package func withBytes<R>(_ body: (Data) throws -> R) throws -> R {
        try compute()
        return try withExtendedLifetime(self) { try body(asData(access: .noCopyIfContiguous).data) }
    }

    /// Evaluates the array.
    /// - Throws: `MLXFailure` where MLX cannot compute it.
    package func compute() throws {
        eval()
        try MLXErrors.confirm()
    }
}

/// Returns what `body` returns, and makes a sentence of its error. A failure of MLX stays what it is: such work may be done again.
package func explaining<R>(_ body: () throws -> R, as sentence: (_ reason: Sentence) -> Sentence) throws -> R {
    do {
        return try body()
    } catch let failure as MLXFailure {
        throw failure
    } catch {
        throw MeSPError(sentence(error.plainSentence))
    }
}
