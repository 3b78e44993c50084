import MLX

/// Arithmetic on arrays of one shape, which a GPU computes in one kernel where it would take one for each operation, some
/// microseconds each, and write as many arrays.
struct Fused: Sendable {
    private let function: @Sendable ([MLXArray]) -> MLXArray
    private let compiled: @Sendable ([MLXArray]) -> [MLXArray]

    /// - Parameter function: has one result, as MLX fuses what leads to one.
    init(_ function: @escaping @Sendable ([MLXArray]) -> MLXArray) {
        self.function = function
        compiled = compile { [function($0)] }
    }

    func callAsFunction(_ arrays: [MLXArray]) -> MLXArray {
        // For the CPU, MLX would call a compiler of C++.
        Device.isCPU ? function(arrays) : compiled(arrays).first ?? function(arrays)
    }
}
