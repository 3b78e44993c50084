import CHostMLX

public enum MLXFast {

    /// Applies rotary position embedding to the first `dimensions`. With `freqs` `[dimensions / 2]` in place of `base`, pair i is
    /// rotated by position/freqs[i] radians.
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

    // swift-format-ignore: AlwaysUseLowerCamelCase
    public static func RoPE(
        _ array: MLXArray, dimensions: Int, traditional: Bool, base: Float?, scale: Float, offset: MLXArray,
        freqs: MLXArray? = nil, stream: StreamOrDevice = .default
    ) -> MLXArray {
        withExtendedLifetime((array, offset, freqs)) {
            MLXArray(
                host_rope_dynamic(
                    array.ctx, dimensions.int32, traditional, base != nil, base ?? 0, scale, offset.ctx, freqs?.ctx,
                    stream.ctx))
        }
    }

    /// The keys to which a query attends.
    ///
    /// - `none`: all keys.
    /// - `array`: the keys that a Boolean mask selects. A mask of numbers is added to the scores.
    /// - `causal`: the keys up to the query's own position. The queries are at the last positions.
    public enum ScaledDotProductAttentionMaskMode {
        case none
        case array(MLXArray)
        case causal

        public var mask: MLXArray? {
            if case .array(let array) = self { array } else { nil }
        }
    }

    public static func scaledDotProductAttention(
        queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float, mask: ScaledDotProductAttentionMaskMode,
        stream: StreamOrDevice = .default
    ) -> MLXArray {
        let isCausal = if case .causal = mask { true } else { false }
        return withExtendedLifetime((queries, keys, values, mask)) {
            MLXArray(
                host_scaled_dot_product_attention(
                    queries.ctx, keys.ctx, values.ctx, scale, isCausal, mask.mask?.ctx, stream.ctx))
        }
    }

    public static func rmsNorm(_ x: MLXArray, weight: MLXArray, eps: Float, stream: StreamOrDevice = .default)
        -> MLXArray
    {
        withExtendedLifetime((x, weight)) { MLXArray(host_rms_norm(x.ctx, weight.ctx, eps, stream.ctx)) }
    }
}
