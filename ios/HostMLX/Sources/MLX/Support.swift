import CHostMLX
import Foundation

public let hostMLXVersion = String(cString: host_version())

/// Guards evaluation and tracing, as in mlx-swift.
let evalLock = NSRecursiveLock()

extension Sequence<Int> {
    var asInt32: [Int32] { map { Int32($0) } }
}

extension Int {
    var int32: Int32 { Int32(self) }
}

extension HostOptionalInt {
    init(_ value: Int?) {
        self.init(value: Int32(value ?? 0), has_value: value != nil)
    }
}

func resolve(axis: Int, ndim: @autoclosure () -> Int) -> Int {
    axis < 0 ? axis + ndim() : axis
}

// MARK: - Calls on handles
//
// A handle is valid as long as its MLXArray, so the arrays are kept alive during each call.

typealias UnaryOperation = (HostArray?, HostStream) -> HostArray?
typealias BinaryOperation = (HostArray?, HostArray?, HostStream) -> HostArray?

func call(_ operation: UnaryOperation, _ a: MLXArray, _ stream: StreamOrDevice = .default) -> MLXArray {
    withExtendedLifetime(a) { MLXArray(operation(a.ctx, stream.ctx)) }
}

func call(
    _ operation: BinaryOperation, _ a: MLXArray, _ b: MLXArray, _ stream: StreamOrDevice = .default
) -> MLXArray {
    withExtendedLifetime((a, b)) { MLXArray(operation(a.ctx, b.ctx, stream.ctx)) }
}

func call(
    _ operation: BinaryOperation, _ a: some ScalarOrArray, _ b: some ScalarOrArray,
    _ stream: StreamOrDevice = .default
) -> MLXArray {
    let (a, b) = toArrays(a, b)
    return call(operation, a, b, stream)
}

typealias Reduction = (HostArray?, UnsafePointer<Int32>?, Int, Bool, HostStream) -> HostArray?

func reduce(
    _ operation: Reduction, _ a: MLXArray, _ axes: [Int32]?, _ keepDims: Bool, _ stream: StreamOrDevice
) -> MLXArray {
    withExtendedLifetime(a) { MLXArray(operation(a.ctx, axes ?? [], axes?.count ?? -1, keepDims, stream.ctx)) }
}

typealias Scan = (HostArray?, Int32, Bool, Bool, HostStream) -> HostArray?

func scan(
    _ operation: Scan, _ a: MLXArray, _ axis: Int?, _ reverse: Bool, _ inclusive: Bool, _ stream: StreamOrDevice
) -> MLXArray {
    let array = axis == nil ? a.reshaped([-1], stream: stream) : a
    return withExtendedLifetime(array) {
        MLXArray(operation(array.ctx, (axis ?? 0).int32, reverse, inclusive, stream.ctx))
    }
}

typealias ListOperation = (HostArray?, UnsafePointer<Int32>?, Int, HostStream) -> HostArray?

func call(_ operation: ListOperation, _ a: MLXArray, _ list: [Int32], _ stream: StreamOrDevice) -> MLXArray {
    withExtendedLifetime(a) { MLXArray(operation(a.ctx, list, list.count, stream.ctx)) }
}

typealias IntOperation = (HostArray?, Int32, HostStream) -> HostArray?
typealias Int2Operation = (HostArray?, Int32, Int32, HostStream) -> HostArray?

func call(_ operation: IntOperation, _ a: MLXArray, _ value: Int, _ stream: StreamOrDevice) -> MLXArray {
    withExtendedLifetime(a) { MLXArray(operation(a.ctx, value.int32, stream.ctx)) }
}

func call(
    _ operation: Int2Operation, _ a: MLXArray, _ first: Int, _ second: Int, _ stream: StreamOrDevice
) -> MLXArray {
    withExtendedLifetime(a) { MLXArray(operation(a.ctx, first.int32, second.int32, stream.ctx)) }
}

func withVector<R>(_ arrays: some Collection<MLXArray>, _ body: (HostVector?) throws -> R) rethrows -> R {
    let vector = newVector(arrays)
    defer { host_vector_free(vector) }
    return try body(vector)
}

/// Returns a C++ vector of the arrays, which the caller must free. Reports an error and returns nil if the operation that created one of the arrays
/// failed.
func newVector(_ arrays: some Collection<MLXArray>) -> HostVector? {
    withExtendedLifetime(arrays) { host_vector_new(arrays.map { $0.ctx }, arrays.count) }
}

/// Returns whether the operation that created the array succeeded. Reports an error if it failed.
func succeeded(_ array: MLXArray) -> Bool {
    _ = array.ndim
    return array.ctx != nil
}

func arrays(in vector: HostVector?) -> [MLXArray] {
    (0..<host_vector_count(vector)).map { MLXArray(host_vector_get(vector, $0)) }
}

func arrays(consuming vector: HostVector?) -> [MLXArray] {
    defer { host_vector_free(vector) }
    return arrays(in: vector)
}

func withCStrings<R>(_ strings: [String], _ body: (UnsafePointer<UnsafePointer<CChar>?>) throws -> R) rethrows -> R {
    let copies = strings.map { strdup($0) }
    defer {
        for copy in copies {
            free(copy)
        }
    }
    return try copies.map { UnsafePointer($0) }.withUnsafeBufferPointer { buffer in
        // An empty array may have no address.
        guard let address = buffer.baseAddress else {
            return try withUnsafePointer(to: nil) { try body($0) }
        }
        return try body(address)
    }
}

func string(consuming text: UnsafeMutablePointer<CChar>?) -> String {
    defer { free(text) }
    return text.map { String(cString: $0) } ?? ""
}

// MARK: - Swift functions called by MLX

private final class FunctionBox {
    let function: ([MLXArray]) -> [MLXArray]

    init(_ function: @escaping ([MLXArray]) -> [MLXArray]) {
        self.function = function
    }
}

/// Makes a closure of `function`. The C++ call that takes the closure owns it.
func newClosure(_ function: @escaping ([MLXArray]) -> [MLXArray]) -> HostClosure {
    HostClosure(
        context: Unmanaged.passRetained(FunctionBox(function)).toOpaque(),
        call: { context, arguments in
            guard let context else { return nil }
            let box = Unmanaged<FunctionBox>.fromOpaque(context).takeUnretainedValue()
            return newVector(box.function(arrays(in: arguments)))
        },
        release: { context in
            guard let context else { return }
            Unmanaged<FunctionBox>.fromOpaque(context).release()
        })
}
