import MLX
import MeSPBundle

/// The arrays of a block's forward pass that the backward pass reads, without the batch axis.
package struct Intermediates: Arrays {
    /// The mixer's arrays; nil if the mixer processes the sequence in segments.
    var mixer: MixerIntermediates?
    let xMid: MLXArray
    /// gate and up `[T, intermediate_size]`; nil if the backward pass recomputes them, tile by tile.
    var gate, up: MLXArray?
    /// The outputs of the mixer and of the MLP before their norms, in a block with post-norms.
    var mixerOut, mlpOut: MLXArray?
    var segments = [Segment]()
    var segment: Segment?

    struct Segment {
        let rows: Range<Int>
        /// For attention, the keys and values of the whole sequence.
        var state: MixerState
        /// The output of attention, kept because recomputing it takes longest; nil for other mixers.
        let attnOut: MLXArray?
    }

    var arrays: [MLXArray] {
        mixer.arrays + [xMid] + [gate, up, mixerOut, mlpOut].compactMap { $0 }
            + segments.flatMap { $0.state.arrays + [$0.attnOut].compactMap { $0 } }
    }
}

/// The arrays of a mixer that the backward pass reads: the outputs of the mixer's input projections, and the mixer's result before the output gate or
/// norm. Their shape is `[T, features]`, except for attention's q, k and v.
package enum MixerIntermediates: Arrays {
    /// q, k and v before their norms and RoPE, `[heads, T, …]`, and attn_out.
    case attention(q: MLXArray, k: MLXArray, v: MLXArray, attnOut: MLXArray)
    /// qkv before its convolution, z, b followed by a, and o.
    case gatedDeltaNet(qkv: MLXArray, z: MLXArray, ba: MLXArray, o: MLXArray)
    case shortConvolution(b: MLXArray, c: MLXArray, u: MLXArray, convOut: MLXArray)
    /// z, xBC before its convolution, dt, and o.
    case mamba2(z: MLXArray, xBC: MLXArray, dt: MLXArray, o: MLXArray)

    init(_ mixer: Mixer, _ a: ArraySlice<MLXArray>) {
        let i = a.startIndex
        self =
            switch mixer {
            case .attention: .attention(q: a[i], k: a[i + 1], v: a[i + 2], attnOut: a[i + 3])
            case .gatedDeltaNet: .gatedDeltaNet(qkv: a[i], z: a[i + 1], ba: a[i + 2], o: a[i + 3])
            case .shortConvolution: .shortConvolution(b: a[i], c: a[i + 1], u: a[i + 2], convOut: a[i + 3])
            case .mamba2: .mamba2(z: a[i], xBC: a[i + 1], dt: a[i + 2], o: a[i + 3])
            }
    }

    static func names(of mixer: Mixer) -> [String] {
        switch mixer {
        case .attention: ["q", "k", "v", "attn_out"]
        case .gatedDeltaNet: ["qkv", "z", "ba", "o"]
        case .shortConvolution: ["b", "c", "u", "conv_out"]
        case .mamba2: ["z", "xBC", "dt", "o"]
        }
    }

    var arrays: [MLXArray] {
        switch self {
        case .attention(let q, let k, let v, let attnOut): [q, k, v, attnOut]
        case .gatedDeltaNet(let qkv, let z, let ba, let o): [qkv, z, ba, o]
        case .shortConvolution(let b, let c, let u, let convOut): [b, c, u, convOut]
        case .mamba2(let z, let xBC, let dt, let o): [z, xBC, dt, o]
        }
    }
}

extension Intermediates {
    var attention: (q: MLXArray, k: MLXArray, v: MLXArray, attnOut: MLXArray) {
        guard case .attention(let q, let k, let v, let attnOut)? = mixer else { preconditionFailure("another mixer") }
        return (q, k, v, attnOut)
    }

    var gatedDeltaNet: (qkv: MLXArray, z: MLXArray, ba: MLXArray, o: MLXArray) {
        guard case .gatedDeltaNet(let qkv, let z, let ba, let o)? = mixer else { preconditionFailure("another mixer") }
        return (qkv, z, ba, o)
    }

    var shortConvolution: (b: MLXArray, c: MLXArray, u: MLXArray, convOut: MLXArray) {
        guard case .shortConvolution(let b, let c, let u, let out)? = mixer else {
            preconditionFailure("another mixer")
        }
        return (b, c, u, out)
    }

    var mamba2: (z: MLXArray, xBC: MLXArray, dt: MLXArray, o: MLXArray) {
        guard case .mamba2(let z, let xBC, let dt, let o)? = mixer else { preconditionFailure("another mixer") }
        return (z, xBC, dt, o)
    }
}

package struct BlockOutputs {
    package let y: MLXArray
    /// RMSNorm(x) `[T, hidden]`; the backward pass recomputes it from x.
    package let mixerIn: MLXArray
    package let intermediates: Intermediates

    package static func names(of mixer: Mixer) -> [String] {
        ["y", "mixer_in"] + MixerIntermediates.names(of: mixer) + ["x_mid", "gate", "up", "mixer_out", "mlp_out"]
    }

    /// Only a block with post-norms has the last two.
    package var list: [MLXArray] {
        let i = intermediates
        return [y, mixerIn] + i.mixer.arrays + [i.xMid] + [i.gate, i.up, i.mixerOut, i.mlpOut].compactMap { $0 }
    }
}

/// The gradients that a segment of a sequence passes to the segment before it.
struct CarriedGradients {
    /// The gradients of attention's k̂ and v̂ at the last n positions before a segment, `[kv_heads, d, n]`.
    var keyValues: MixerState.KeyValues?
    var net: GatedDeltaNet.CarriedGradients?
}
