import MLX

/// A function whose operations MLX fuses if `isAvailable`. Otherwise each operation writes an array.
struct Fused: Sendable {
    private typealias Function = @Sendable ([MLXArray]) -> [MLXArray]
    private let function: Function
    // A compiled function stays on the device of its first call, so each device has its own compiled function.
    private let compiled: [(onCPU: Function, onGPU: Function)]

    init(_ function: @escaping @Sendable ([MLXArray]) -> MLXArray) { self.init(1) { [function($0)] } }

    /// With fusion, each of `count` results is computed by itself, and operations that the results share are repeated.
    init(_ count: Int, _ function: @escaping @Sendable ([MLXArray]) -> [MLXArray]) {
        self.function = function
        compiled = (0..<count).map { index in
            let one: Function = { [function($0)[index]] }
            return (compile(one), compile(one))
        }
    }

    func callAsFunction(_ arrays: [MLXArray]) -> MLXArray { results(arrays)[0] }

    func results(_ arrays: [MLXArray]) -> [MLXArray] {
        guard Self.isAvailable else { return function(arrays) }
        // After an error of MLX a compiled function may return nothing.
        let results = compiled.flatMap { Device.isCPU ? $0.onCPU(arrays) : $0.onGPU(arrays) }
        return results.count == compiled.count ? results : function(arrays)
    }

    static var isAvailable: Bool { !Device.isCPU || Processor.cpu.fuses }
}

func maskedSoftmax(_ scores: MLXArray, _ visible: MLXArray) -> MLXArray {
    Device.isCPU && Fused.isAvailable
        ? fusedSoftmax([scores, which(visible, Float(0), -Float.infinity)])
        : softmax(which(visible, scores, -Float.infinity), axis: -1)
}

private let fusedSoftmax = Fused {
    let masked = $0[0] + $0[1]
    let e = exp(masked - masked.max(axis: -1, keepDims: true))
    return e / e.sum(axis: -1, keepDims: true)
}
