import CHostMLX
import Foundation

// MARK: - Evaluation

public func eval(_ arrays: MLXArray...) {
    eval(arrays)
}

public func eval(_ arrays: some Collection<MLXArray>) {
    withVector(arrays) { vector in
        _ = evalLock.withLock { host_eval(vector) }
    }
}

public func asyncEval(_ arrays: some Collection<MLXArray>) {
    withVector(arrays) { vector in
        _ = evalLock.withLock { host_async_eval(vector) }
    }
}

// MARK: - Differentiation

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

// MARK: - Compilation

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

    private var id: UInt { UInt(bitPattern: Unmanaged.passUnretained(self).toOpaque()) }

    deinit {
        host_compile_erase(id)
    }

    func callAsFunction(_ arguments: [MLXArray]) -> [MLXArray] {
        lock.withLock {
            let state = inputs.flatMap { $0.innerState() }
            // While MLX traces the function, the arrays of the state hold tracers.
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

private func first(_ results: [MLXArray]) -> MLXArray {
    results.first ?? MLXArray(0)
}

/// Returns a compiled `f`. Besides its arguments, `f` may read the arrays of `inputs`, and it may change the arrays of `outputs`.
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
