import MLX

/// MLX fuses the operations if `isAvailable`. Otherwise each operation writes an array.
struct Fused: Sendable {
    private let function: @Sendable ([MLXArray]) -> MLXArray
    // A compiled function stays on the device of its first call, so each device has its own compiled function.
    private let onCPU: @Sendable ([MLXArray]) -> [MLXArray]
    private let onGPU: @Sendable ([MLXArray]) -> [MLXArray]

    init(_ function: @escaping @Sendable ([MLXArray]) -> MLXArray) {
        self.function = function
        onCPU = compile { [function($0)] }
        onGPU = compile { [function($0)] }
    }

    func callAsFunction(_ arrays: [MLXArray]) -> MLXArray {
        guard Self.isAvailable else { return function(arrays) }
        return (Device.isCPU ? onCPU(arrays) : onGPU(arrays)).first ?? function(arrays)
    }

    static var isAvailable: Bool { !Device.isCPU || Processor.cpu.fuses }
}

/// With fusion, each result is computed by itself, and operations that the results share are repeated.
struct FusedResults: Sendable {
    private let function: @Sendable ([MLXArray]) -> [MLXArray]
    private let results: [Fused]

    init(_ count: Int, _ function: @escaping @Sendable ([MLXArray]) -> [MLXArray]) {
        self.function = function
        results = (0..<count).map { index in Fused { function($0)[index] } }
    }

    func callAsFunction(_ arrays: [MLXArray]) -> [MLXArray] {
        Fused.isAvailable ? results.map { $0(arrays) } : function(arrays)
    }
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
