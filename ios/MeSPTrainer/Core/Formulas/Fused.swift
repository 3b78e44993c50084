import MLX

/// Arithmetic on arrays of one shape, computed together where each operation would take a kernel of a GPU, some microseconds, or a
/// pass over memory, and write an array.
struct Fused: Sendable {
    private let function: @Sendable ([MLXArray]) -> MLXArray
    private let compiled: @Sendable ([MLXArray]) -> [MLXArray]

    /// - Parameter function: has one result, as MLX fuses what leads to one.
    init(_ function: @escaping @Sendable ([MLXArray]) -> MLXArray) {
        self.function = function
        compiled = compile { [function($0)] }
    }

    func callAsFunction(_ arrays: [MLXArray]) -> MLXArray {
        Self.isAvailable ? compiled(arrays).first ?? function(arrays) : function(arrays)
    }

    /// Whether operations are fused at all.
    static var isAvailable: Bool { !Device.isCPU || CPUProducts.current.fuses }
}
