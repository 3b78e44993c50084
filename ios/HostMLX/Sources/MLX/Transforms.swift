import CHostMLX
import Foundation

// MARK: - Evaluation

/// Computes the arrays.
public func eval(_ arrays: MLXArray...) {
    eval(arrays)
}

/// Computes the arrays.
public func eval(_ arrays: some Collection<MLXArray>) {
    withVector(arrays) { vector in
        _ = evalLock.withLock { host_eval(vector) }
    }
}

/// Computes the arrays in the values: ``Evaluatable`` ones, collections, dictionaries and tuples.
public func eval(_ values: Any...) {
    eval(collect(values))
}

/// Computes the arrays in the values: ``Evaluatable`` ones, collections, dictionaries and tuples.
public func eval(_ values: some Sequence<Any>) {
    eval(collect(values))
}

/// Computes the arrays, or throws.
public func checkedEval(_ values: Any...) throws {
    let arrays = collect(values)
    try withError { eval(arrays) }
}

/// Computes the arrays, or throws.
public func checkedEval(_ values: some Sequence<Any>) throws {
    let arrays = collect(values)
    try withError { eval(arrays) }
}

/// Begins to compute the arrays.
public func asyncEval(_ arrays: some Collection<MLXArray>) {
    withVector(arrays) { vector in
        _ = evalLock.withLock { host_async_eval(vector) }
    }
}

/// Begins to compute the arrays in the values.
public func asyncEval(_ values: Any...) {
    asyncEval(collect(values))
}

/// Begins to compute the arrays in the values.
public func asyncEval(_ values: some Sequence<Any>) {
    asyncEval(collect(values))
}

private func collect(_ values: some Sequence<Any>) -> [MLXArray] {
    values.flatMap { collect($0) }
}

private func collect(_ item: Any) -> [MLXArray] {
    switch item {
    case let item as Evaluatable: item.innerState()
    case let item as [Any]: collect(item)
    case let item as [AnyHashable: Any]: collect(item.values)
    case let item as (Any, Any): collect([item.0, item.1])
    case let item as (Any, Any, Any): collect([item.0, item.1, item.2])
    case let item as (Any, Any, Any, Any): collect([item.0, item.1, item.2, item.3])
    case let item as (Any, Any, Any, Any, Any): collect([item.0, item.1, item.2, item.3, item.4])
    case is String, is any BinaryInteger, is any BinaryFloatingPoint: []
    default: fatalError("Unable to extract MLXArray from \(item)")
    }
}

// MARK: - Differentiation

/// The function's values, and the products of its Jacobian with the tangents.
public func jvp(
    _ f: @escaping ([MLXArray]) -> [MLXArray], primals: some Collection<MLXArray>,
    tangents: some Collection<MLXArray>
) -> ([MLXArray], [MLXArray]) {
    var values: HostVector?
    var derivatives: HostVector?
    withVector(primals) { primals in
        withVector(tangents) { tangents in
            _ = evalLock.withLock { host_jvp(newClosure(f), primals, tangents, &values, &derivatives) }
        }
    }
    return (arrays(consuming: values), arrays(consuming: derivatives))
}

/// The function's values, and the products of the cotangents with its Jacobian, one for each primal.
public func vjp(
    _ f: @escaping ([MLXArray]) -> [MLXArray], primals: some Collection<MLXArray>,
    cotangents: some Collection<MLXArray>
) -> ([MLXArray], [MLXArray]) {
    var values: HostVector?
    var gradients: HostVector?
    withVector(primals) { primals in
        withVector(cotangents) { cotangents in
            _ = evalLock.withLock { host_vjp(newClosure(f), primals, cotangents, &values, &gradients) }
        }
    }
    return (arrays(consuming: values), arrays(consuming: gradients))
}

/// The gradients of the first of `f`'s values with respect to the arguments of these numbers.
public func grad(
    _ f: @escaping ([MLXArray]) -> [MLXArray], argumentNumbers: some Collection<Int> = [0]
) -> ([MLXArray]) -> [MLXArray] {
    let valueAndGradient = valueAndGrad(f, argumentNumbers: argumentNumbers)
    return { valueAndGradient($0).1 }
}

/// The gradient of `f` with respect to the first of the arguments of these numbers.
public func grad(
    _ f: @escaping ([MLXArray]) -> MLXArray, argumentNumbers: some Collection<Int> = [0]
) -> ([MLXArray]) -> MLXArray {
    let gradient = grad({ [f($0)] }, argumentNumbers: argumentNumbers)
    return { gradient($0)[0] }
}

public func grad(_ f: @escaping (MLXArray) -> [MLXArray]) -> (MLXArray) -> [MLXArray] {
    let gradient = grad({ (arguments: [MLXArray]) in f(arguments[0]) })
    return { gradient([$0]) }
}

public func grad(_ f: @escaping (MLXArray) -> MLXArray) -> (MLXArray) -> MLXArray {
    let gradient = grad({ (arguments: [MLXArray]) in [f(arguments[0])] })
    return { gradient([$0])[0] }
}

/// The values of `f`, and the gradients of the first with respect to the arguments of these numbers.
public func valueAndGrad(
    _ f: @escaping ([MLXArray]) -> [MLXArray], argumentNumbers: some Collection<Int> = [0]
) -> ([MLXArray]) -> ([MLXArray], [MLXArray]) {
    let numbers = argumentNumbers.asInt32
    return { inputs in
        var values: HostVector?
        var gradients: HostVector?
        withVector(inputs) { inputs in
            _ = evalLock.withLock {
                host_value_and_grad(newClosure(f), numbers, numbers.count, inputs, &values, &gradients)
            }
        }
        return (arrays(consuming: values), arrays(consuming: gradients))
    }
}

// MARK: - Compilation

/// A function that is traced once for each kind of arguments, and its operations fused.
private final class CompiledFunction: @unchecked Sendable {
    private let lock = NSLock()
    private let function: ([MLXArray]) -> [MLXArray]
    private let inputs: [any Updatable]
    private let outputs: [any Updatable]
    private let shapeless: Bool

    init(
        inputs: [any Updatable], outputs: [any Updatable], shapeless: Bool,
        _ function: @escaping ([MLXArray]) -> [MLXArray]
    ) {
        self.function = function
        self.inputs = inputs
        self.outputs = outputs
        self.shapeless = shapeless
    }

    /// The name of the compiled code.
    private var id: UInt { UInt(bitPattern: Unmanaged.passUnretained(self).toOpaque()) }

    deinit {
        host_compile_erase(id)
    }

    func callAsFunction(_ arguments: [MLXArray]) -> [MLXArray] {
        lock.withLock {
            let state = inputs.flatMap { $0.innerState() }
            // While the function is traced, its state holds tracers.
            let closure = newClosure { [function, outputs] tracers in
                let saved = state.map { $0.copyContext() }
                update(state, tracers[arguments.count...])
                let results = function(Array(tracers.prefix(arguments.count)))
                let newState = outputs.flatMap { $0.innerState() }.map { $0.copyContext() }
                update(state, saved)
                return results + newState
            }
            let all = withVector(arguments + state) { inputs in
                evalLock.withLock { arrays(consuming: host_compiled_call(closure, id, shapeless, inputs)) }
            }
            if all.isEmpty { return [] }
            let outputState = outputs.flatMap { $0.innerState() }
            update(outputState, all.suffix(outputState.count))
            return Array(all.dropLast(outputState.count))
        }
    }
}

private func update(_ arrays: [MLXArray], _ newArrays: some Sequence<MLXArray>) {
    for (array, newArray) in zip(arrays, newArrays) {
        array._updateInternal(newArray)
    }
}

/// The first result, or something in its place after an error.
private func first(_ results: [MLXArray]) -> MLXArray {
    results.first ?? MLXArray(0)
}

/// `f`, traced and fused; arrays that it reads or changes besides its arguments are in `inputs` and `outputs`.
public func compile(
    inputs: [any Updatable] = [], outputs: [any Updatable] = [], shapeless: Bool = false,
    _ f: @escaping ([MLXArray]) -> [MLXArray]
) -> @Sendable ([MLXArray]) -> [MLXArray] {
    let compiled = CompiledFunction(inputs: inputs, outputs: outputs, shapeless: shapeless, f)
    return { compiled($0) }
}

public func compile(
    inputs: [any Updatable] = [], outputs: [any Updatable] = [], shapeless: Bool = false,
    _ f: @escaping (MLXArray) -> MLXArray
) -> @Sendable (MLXArray) -> MLXArray {
    let compiled = CompiledFunction(inputs: inputs, outputs: outputs, shapeless: shapeless) { [f($0[0])] }
    return { first(compiled([$0])) }
}

public func compile(
    inputs: [any Updatable] = [], outputs: [any Updatable] = [], shapeless: Bool = false,
    _ f: @escaping (MLXArray, MLXArray) -> MLXArray
) -> @Sendable (MLXArray, MLXArray) -> MLXArray {
    let compiled = CompiledFunction(inputs: inputs, outputs: outputs, shapeless: shapeless) { [f($0[0], $0[1])] }
    return { first(compiled([$0, $1])) }
}

public func compile(
    inputs: [any Updatable] = [], outputs: [any Updatable] = [], shapeless: Bool = false,
    _ f: @Sendable @escaping (MLXArray, MLXArray, MLXArray) -> MLXArray
) -> @Sendable (MLXArray, MLXArray, MLXArray) -> MLXArray {
    let compiled = CompiledFunction(inputs: inputs, outputs: outputs, shapeless: shapeless) {
        [f($0[0], $0[1], $0[2])]
    }
    return { first(compiled([$0, $1, $2])) }
}

/// Turns compilation on or off.
public func compile(enable: Bool = true) {
    host_compile_enable(enable)
}
