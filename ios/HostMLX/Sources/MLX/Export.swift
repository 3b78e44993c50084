import CHostMLX
import Foundation

/// Calls `body` with a function's positional and named arguments. If a name occurs twice, the first one counts.
///
/// As in mlx-swift, an argument that is a failed array is reported to the error handler and left out.
private func withArguments<R>(
    _ arguments: KeyValuePairs<String, MLXArray>,
    _ body: (_ positional: HostVector?, _ names: UnsafePointer<UnsafePointer<CChar>?>, _ count: Int, HostVector?) -> R
) throws -> R {
    let arguments = arguments.filter { succeeded($0.value) }
    let named = arguments.filter { !$0.key.isEmpty }
    return try withVector(arguments.filter { $0.key.isEmpty }.map { $0.value }) { positional in
        try withVector(named.map { $0.value }) { values in
            try withCStrings(named.map { $0.key }) { names in
                try withError { body(positional, names, named.count, values) }
            }
        }
    }
}

/// Returns an exporter that writes a function to a file when it is called with example arguments.
///
/// ```swift
/// try exportFunction(to: url, f)(x, scale: y)
/// ```
public func exportFunction(
    to url: URL, shapeless: Bool = false, _ f: @escaping ([MLXArray]) -> [MLXArray]
) -> FunctionExporterSingle {
    FunctionExporterSingle(url: url, shapeless: shapeless, f: f)
}

@dynamicCallable
public final class FunctionExporterSingle {
    let url: URL
    let shapeless: Bool
    let f: ([MLXArray]) -> [MLXArray]

    init(url: URL, shapeless: Bool, f: @escaping ([MLXArray]) -> [MLXArray]) {
        self.url = url
        self.shapeless = shapeless
        self.f = f
    }

    public func dynamicallyCall(withKeywordArguments args: KeyValuePairs<String, MLXArray>) throws {
        _ = try withArguments(args) {
            host_export_function(url.path, newClosure(f), $0, $1, $2, $3, shapeless)
        }
    }
}

public func importFunction(from url: URL) throws -> ImportedFunction {
    try ImportedFunction(url: url)
}

/// A function from a file.
///
/// ```swift
/// let f = try importFunction(from: url)
/// let outputs = try f(x, scale: y)
/// ```
@dynamicCallable
public final class ImportedFunction {
    private let ctx: HostFunction?

    public init(url: URL) throws {
        ctx = try withError {
            initError()
            return host_import_function(url.path)
        }
    }

    deinit {
        host_function_free(ctx)
    }

    public func dynamicallyCall(withKeywordArguments args: KeyValuePairs<String, MLXArray>) throws -> [MLXArray] {
        try withArguments(args) { arrays(consuming: host_function_call(ctx, $0, $1, $2, $3)) }
    }
}
