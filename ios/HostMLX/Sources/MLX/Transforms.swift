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

    init(_ function: @escaping ([MLXArray]) -> [MLXArray]) { self.function = function }

    private var id: UInt { UInt(bitPattern: Unmanaged.passUnretained(self).toOpaque()) }

    deinit {
        host_compile_erase(id)
    }

    func callAsFunction(_ arguments: [MLXArray]) -> [MLXArray] {
        lock.withLock {
            withVector(arguments) { inputs in
                evalLock.withLock { arrays(consuming: host_compiled_call(newClosure(function), id, inputs)) }
            }
        }
    }
}

public func compile(_ f: @escaping ([MLXArray]) -> [MLXArray]) -> @Sendable ([MLXArray]) -> [MLXArray] {
    let compiled = CompiledFunction(f)
    return { compiled($0) }
}

public func compile(_ f: @escaping (MLXArray) -> MLXArray) -> @Sendable (MLXArray) -> MLXArray {
    let compiled = CompiledFunction { [f($0[0])] }
    return { compiled([$0]).first ?? .mlxNone }
}
