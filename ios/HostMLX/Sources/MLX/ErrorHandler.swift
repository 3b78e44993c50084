// mlx-swift has the same overloads.
// swift-format-ignore-file: AmbiguousTrailingClosureOverload

import CHostMLX
import Foundation

/// Runs `body`. During the call, `handler` receives MLX's errors in place of any outer handler.
public func withErrorHandler<R>(
    _ handler: @escaping @Sendable (String) -> Void, _ body: () throws -> R
) rethrows -> R {
    try ErrorHandler.$handlers.withValue(ErrorHandler.handlers + [handler], operation: body)
}

/// Runs `body`, and then throws the first error of MLX during the call, if any.
///
/// `body` can itself check for an error with ``ErrorBox/check()``.
public func withError<R>(_ body: (ErrorBox) throws -> R) throws -> R {
    let box = ErrorBox()
    let result = try withErrorHandler({ box.firstError = MLXError.caught($0) }, { try body(box) })
    try box.check()
    return result
}

public func withError<R>(_ body: () throws -> R) throws -> R {
    try withError { _ in try body() }
}

public enum MLXError: LocalizedError, Sendable, Equatable {
    case caught(String)

    public var errorDescription: String? {
        switch self {
        case .caught(let message): "MLX Error: \(message)"
        }
    }
}

public final class ErrorBox: @unchecked Sendable {
    private let lock = NSLock()
    private var first: Error?

    public var firstError: Error? {
        get { lock.withLock { first } }
        set { lock.withLock { first = first ?? newValue } }
    }

    public func check() throws {
        if let firstError {
            throw firstError
        }
    }
}

private enum ErrorHandler {
    @TaskLocal static var handlers: [@Sendable (String) -> Void] = []

    /// Passes MLX's errors to the innermost handler. Without a handler, an error ends the program.
    static let installed: Void = host_set_error_handler { message in
        let message = message.map { String(cString: $0) } ?? ""
        guard let handler = handlers.last else { fatalError(message) }
        handler(message)
    }
}

func initError() {
    ErrorHandler.installed
}
