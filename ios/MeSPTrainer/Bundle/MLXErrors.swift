import Foundation
import MLX
import MeSPFiles
import MeSPSentences

/// Collects the errors that MLX reports during work, and repeats failed work.
///
/// MLX's functions do not throw. mlx-swift passes an error to the current error handler and returns. Then `eval` has computed nothing, and reading
/// the array ends the process. A GPU can report an error after `eval` has returned, when the stream is synchronized or used again. The evaluated
/// arrays then hold garbage. Synchronizing commits an empty command buffer, which can fail too.
///
/// Therefore a value may be used only after it is confirmed: the stream was synchronized and no error was found. A run does all its work on a GPU in
/// pieces (`repeating`). A piece begins with confirmed arrays and ends with the one wait that confirms its results. A piece that fails is repeated.
package enum MLXErrors {
    private struct Work: Sendable {
        var errors: ErrorBox
        /// The stream of a GPU; nil on a CPU, which reports errors before a function returns.
        let stream: MLX.Stream?
        let isRepeated: Bool
        let failures: Guarded<[String]>
        /// The first error of `interrupt`.
        let interruption = Guarded<(any Error)?>(nil)
    }

    @TaskLocal private static var work: Work?

    /// Calls `body` and collects MLX's errors in it. A nested call on the same stream is part of the outer work.
    ///
    /// - Throws: `MeSPError` with MLX's first error (`MLXFailure` in a nested call), or else the error of `body`.
    package static func collect<R>(on stream: MLX.Stream? = nil, _ body: () throws -> R) throws -> R {
        if let work, work.stream == stream { return try checked(body) }
        do {
            return try collect(stream, isRepeated: false, Guarded([]), body)
        } catch let failure as MLXFailure {
            throw MeSPError(failure.sentence)
        }
    }

    private static func collect<R>(
        _ stream: MLX.Stream?, isRepeated: Bool, _ failures: Guarded<[String]>, _ body: () throws -> R
    ) throws -> R {
        try withError { errors in
            let work = Work(errors: errors, stream: stream, isRepeated: isRepeated, failures: failures)
            return try $work.withValue(work) { try checked(body) }
        }
    }

    /// Calls `body`, whose errors of MLX do not count for later work. On a CPU, other errors do: work cannot go on after them.
    package static func separate<R>(_ body: () throws -> R) throws -> R {
        guard let work else { return try body() }
        return try withError { errors in
            var own = work
            own.errors = errors
            return try $work.withValue(own, operation: body)
        }
    }

    /// Calls `body` and checks for errors. An error of MLX takes precedence over another error that `body` throws.
    ///
    /// - Throws: `MLXFailure` if MLX has failed since `collect`, `separate` or `repeating` began, or else the error of `body`.
    package static func checked<R>(_ body: () throws -> R) throws -> R {
        let result = Result { try body() }
        if case .failure(let error) = result, error is MLXFailure { throw error }
        try check()
        // Imported functions throw MLX's error themselves.
        do { return try result.get() } catch let error as MLXError { throw MLXFailure(error) }
    }

    /// Waits for the GPU to complete its work, and checks for errors.
    ///
    /// - Throws: `MLXFailure` if MLX has failed since `collect` or `repeating` began.
    package static func confirm() throws {
        if !isInterrupted { work?.stream?.synchronize() }
        try check()
    }

    /// Ends the piece of work in progress on a GPU, which then evaluates nothing more and throws `error`. Does nothing on a CPU.
    ///
    /// A pause within a block calls it, because the formulas of a block do not throw, and iOS may refuse the GPU to the rest of the block.
    package static func interrupt(_ error: any Error) {
        if let work, work.stream != nil, work.isRepeated { work.interruption.withLock { $0 = $0 ?? error } }
    }

    private static var interruption: (any Error)? { work?.interruption.withLock { $0 } }
    package static var isInterrupted: Bool { interruption != nil }

    /// Checks for errors without waiting for the GPU. A GPU may report an error later; see `confirm`.
    ///
    /// - Throws: `MLXFailure` if MLX has reported an error since `collect` or `repeating` began; the error of an interruption.
    package static func check() throws {
        if let interruption { throw interruption }
        guard let work, let error = work.errors.firstError else { return }
        // Kernels may still write into the caller's arrays, so the GPU must finish before the arrays are freed.
        if let stream = work.stream { try? withError { stream.synchronize() } }
        throw MLXFailure(error)
    }

    /// Calls `body`. On a GPU, confirms the results, and calls `body` again if MLX fails.
    ///
    /// Before the call, all arrays that `body` reads must be confirmed. `body` must not change them. A nested call is part of the outer repeated
    /// work.
    ///
    /// - Parameters:
    ///   - confirms: false if `body` does nothing on the GPU after its last call of `number`, `numbers` or `compute`, which confirm.
    ///   - beforeRetry: called before `body` is called again. It may wait or throw.
    /// - Throws: `MLXFailure` with `isFinal` set if MLX has failed too often, or the error of `body` or `beforeRetry`.
    package static func repeating<R>(
        confirms: Bool = true, beforeRetry: () throws -> Void = {}, _ body: () throws -> R
    ) throws -> R {
        guard let work, let stream = work.stream, !work.isRepeated else { return try body() }
        var attempts = Attempts()
        while true {
            do {
                return try collect(stream, isRepeated: true, work.failures) {
                    do {
                        let result = try body()
                        if confirms { try confirm() }
                        return result
                    } catch let error where error is MLXFailure || error is CancellationError || error is GPUWithdrawn {
                        throw error
                    } catch {
                        // The reason may be garbage of a failed command buffer. After an interruption iOS may refuse the GPU.
                        if !isInterrupted { stream.synchronize() }
                        throw error
                    }
                }
            } catch var failure as MLXFailure {
                guard attempts.allowAnother(after: failure) else {
                    failure.isFinal = true
                    throw failure
                }
                work.failures.withLock { $0.append(failure.message) }
                try attempts.wait(beforeRetry)
            }
        }
    }

    private struct Attempts {
        private static let most = 3
        /// The number of refusals of background work by iOS that do not count as failures, the time between attempts, and the longest time of all
        /// attempts. iOS lets an app run for some five seconds after it has left the front.
        private static let (mostRefusals, pause, longest) = (4, Duration.seconds(1), Duration.seconds(5))

        private var (failures, refusals) = (0, 0)
        private var begin = ContinuousClock.now

        mutating func allowAnother(after failure: MLXFailure) -> Bool {
            guard failure.isRefusal else {
                failures += 1
                return failures < Self.most
            }
            refusals += 1
            guard refusals <= Self.mostRefusals, .now - begin < Self.longest else { return false }
            Thread.sleep(forTimeInterval: Self.pause / .seconds(1))
            return true
        }

        /// Calls `body`. If it waits, as a paused run does, the refusals before it do not count.
        mutating func wait(_ body: () throws -> Void) throws {
            let start = ContinuousClock.now
            try body()
            if .now - start > Self.pause { (refusals, begin) = (0, .now) }
        }
    }

    /// Whether work is on a GPU, which may report an error late. Such work is repeated; so the arrays that it reads must be kept.
    package static var areLate: Bool { work?.stream != nil }

    /// Evaluates `arrays` on a GPU, so that later work does not depend on unevaluated results of repeated work. Does nothing on a CPU.
    package static func evaluateOnGPU(_ arrays: [MLXArray]) { if areLate, !isInterrupted { eval(arrays) } }

    package static func takeFailures() -> [String] {
        work?.failures.withLock { failures in
            defer { failures = [] }
            return failures
        } ?? []
    }
}

/// Ends work that may not use the GPU again, not even to save.
package struct GPUWithdrawn: Error {
    package init() {}
}

package struct MLXFailure: SentenceError {
    package let message: String
    package fileprivate(set) var isFinal = false

    fileprivate init(_ error: any Error) {
        // mlx-c appends its source file and line to the message.
        message = error.localizedDescription.replacing(#/ at /\S+:[0-9]+$/#, with: "").replacing(#/\.+$/#, with: "")
    }

    var isRefusal: Bool { message.contains("BackgroundExecutionNotPermitted") }

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
    /// Makes an array of numbers in memory.
    ///
    /// If MLX lacks the memory, it reports an error, and the array has no shape. Then the functions that use the shape would end the process before the
    /// error is found, so this function returns zeros in place of the array.
    package static func of<T: HasDType>(_ values: [T], _ shape: [Int]? = nil) -> MLXArray {
        MLXArray(values, shape).orZeros(shape ?? [values.count], T.dtype)
    }

    package static func of(_ bytes: Data, _ shape: [Int], _ dtype: DType) -> MLXArray {
        MLXArray(bytes, shape, dtype: dtype).orZeros(shape, dtype)
    }

    private func orZeros(_ shape: [Int], _ dtype: DType) -> MLXArray {
        self.shape == shape ? self : MLXArray.zeros(shape, dtype: dtype)
    }

    package func number<T: HasDType>(_ type: T.Type) throws -> T {
        let array = asType(T.dtype)
        try array.compute()
        return array.item(type)
    }

    package func numbers<T: HasDType>(_ type: T.Type) throws -> [T] {
        let array = asType(T.dtype)
        try array.compute()
        return array.asArray(type)
    }

    /// Calls `body` with the bytes of the elements in row-major order. The bytes are not copied if the array is contiguous.
    ///
    /// - Parameter confirms: false if the array is confirmed already, or if the caller confirms it later and then repeats what `body` does.
    package func withBytes<R>(confirms: Bool = true, _ body: (Data) throws -> R) throws -> R {
        try compute(confirms: confirms)
        return try withExtendedLifetime(self) { try body(asData(access: .noCopyIfContiguous).data) }
    }

    /// Evaluates the array.
    ///
    /// - Parameter confirms: false to report only errors that MLX has found already.
    package func compute(confirms: Bool = true) throws {
        if !MLXErrors.isInterrupted { eval() }
        try confirms ? MLXErrors.confirm() : MLXErrors.check()
    }
}

/// Calls `body`. If it throws an error, throws a `MeSPError` with the sentence that `sentence` returns for the reason. Rethrows errors of MLX
/// unchanged, because the failed work may be repeated.
package func explaining<R>(_ body: () throws -> R, as sentence: (_ reason: Sentence) -> Sentence) throws -> R {
    do {
        return try body()
    } catch let error where error is MLXFailure || error is MLXError {
        throw error
    } catch {
        throw MeSPError(sentence(error.plainSentence))
    }
}
