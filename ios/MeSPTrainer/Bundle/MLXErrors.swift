import Foundation
import MLX
import MeSPSentences

/// The errors of MLX in a stretch of work.
///
/// MLX's functions do not throw: mlx-swift hands an error to the handler in force and returns. Then `eval` has computed nothing,
/// `item()` is 0, and `asData` reads through a null pointer. So an error is looked for wherever a value leaves MLX, and after each use
/// of weights.
package enum MLXErrors {
    @TaskLocal private static var box: ErrorBox?

    /// Calls `body`, in which `check()` sees MLX's errors.
    ///
    /// - Throws: `MeSPError` with the first error of MLX; if there is none, the error of `body`.
    package static func collect<R>(_ body: () throws -> R) throws -> R {
        // `check()` has already thrown what `withError` would throw at its end.
        try withError { errors in
            try $box.withValue(errors) {
                let result = Result { try body() }
                try check()
                return try result.get()
            }
        }
    }

    /// - Throws: `MeSPError` where MLX has failed since `collect` began.
    package static func check() throws {
        guard let error = box?.firstError else { return }
        // mlx-c appends where in its sources the error was caught.
        let message = error.localizedDescription.replacing(#/ at /\S+:[0-9]+$/#, with: "")
        throw MeSPError("\(message).")
    }
}

extension MLXArray {
    /// The element of an array that has one.
    /// - Throws: `MeSPError` where MLX cannot compute it.
    package func number<T: HasDType>(_ type: T.Type) throws -> T {
        let number = item(type)
        try MLXErrors.check()
        return number
    }

    /// The elements in their order.
    /// - Throws: `MeSPError` where MLX cannot compute them.
    package func numbers<T: HasDType>(_ type: T.Type) throws -> [T] {
        let array = asType(T.dtype)
        try array.compute()
        return array.asArray(type)
    }

    /// Calls `body` with the bytes of the elements in their order, which are the array's own where it is contiguous.
    /// - Throws: `MeSPError` where MLX cannot compute them, and what `body` throws.
    package func withBytes<R>(_ body: (Data) throws -> R) throws -> R {
        try compute()
        return try withExtendedLifetime(self) { try body(asData(access: .noCopyIfContiguous).data) }
    }

    /// Evaluates the array.
    /// - Throws: `MeSPError` where MLX cannot compute it.
    package func compute() throws {
        eval()
        try MLXErrors.check()
    }
}
