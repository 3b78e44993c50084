import CHostMLX

/// Fused operations: one kernel each on the GPU, plain operations elsewhere.
public enum MLXFast {

    /// Rotary positions of the first `dimensions`; `freqs` are periods in radians, `[dimensions / 2]`, in place of `base`.
    // swift-format-ignore: AlwaysUseLowerCamelCase
    public static func RoPE(
        _ array: MLXArray, dimensions: Int, traditional: Bool, base: Float?, scale: Float, offset: Int,
        freqs: MLXArray? = nil, stream: StreamOrDevice = .default
    ) -> MLXArray {
        withExtendedLifetime((array, freqs)) {
            MLXArray(
                host_rope(
                    array.ctx, dimensions.int32, traditional, base != nil, base ?? 0, scale, offset.int32, freqs?.ctx,
                    stream.ctx))
        }
    }

    /// x / √(mean(x²) + eps) · weight, over the last axis.
    public static func rmsNorm(_ x: MLXArray, weight: MLXArray, eps: Float, stream: StreamOrDevice = .default)
        -> MLXArray
    {
        withExtendedLifetime((x, weight)) { MLXArray(host_rms_norm(x.ctx, weight.ctx, eps, stream.ctx)) }
    }
}
