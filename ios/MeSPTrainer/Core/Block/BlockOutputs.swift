import MLX

/// The forward pass of one block over a whole sequence x `[1, T, hidden]`, with the outputs that are asked for. What another implementation
/// than `Block` returns is not evaluated.
protocol BlockForward {
    /// y `[1, T, hidden]`.
    func output(_ x: MLXArray) throws -> MLXArray
    /// The arrays that the backward pass reads, without gate and up.
    func intermediates(_ x: MLXArray) throws -> Intermediates
    func outputs(_ x: MLXArray) throws -> BlockOutputs
}

/// Everything that the exported block function returns.
struct BlockOutputs {
    /// `[1, T, hidden]`
    let y: MLXArray
    /// RMSNorm(x) `[T, hidden]`; the backward pass makes it again from x.
    let mixerIn: MLXArray
    let intermediates: Intermediates

    /// The names of docs/method.md, in the function's order.
    static func names(of mixer: Mixer) -> [String] {
        ["y", "mixer_in"] + mixer.intermediates + ["x_mid", "gate", "up", "mixer_out", "mlp_out"]
    }

    /// In the function's order; the last two only of a block with post-norms.
    var list: [MLXArray] {
        let i = intermediates
        return [y, mixerIn, i.m1, i.m2, i.m3, i.mixed, i.xMid] + [i.gate, i.up, i.mixerOut, i.mlpOut].compactMap { $0 }
    }
}

/// The arrays between a block's input and its output that the backward pass reads, without the axis of the batch.
struct Intermediates {
    /// Of the mixer's projections `[T, features]`, or `[heads, T, d]` of attention's:
    ///
    ///     attention            q, behind each head its gate if it has one;  k;  v
    ///     gated delta net      qkv, before its convolution;  z;  b and a behind it
    ///     short convolution    b;  c;  u
    let m1, m2, m3: MLXArray
    /// The result of the mixer's formula, before its output's gate or norm `[T, features]`.
    let mixed: MLXArray
    let xMid: MLXArray
    /// `[T, intermediate_size]`; nil where the backward pass makes them again, tile by tile.
    var gate, up: MLXArray?
    /// The outputs of the mixer and of the MLP before their norms, in a block with post-norms.
    var mixerOut, mlpOut: MLXArray?

    var arrays: [MLXArray] { [m1, m2, m3, mixed, xMid] + [gate, up, mixerOut, mlpOut].compactMap { $0 } }
}
