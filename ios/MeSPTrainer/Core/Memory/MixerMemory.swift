/// The memory of a mixer's arrays for a sequence, in bytes. Counts of arrays follow the code; the few constants were fitted to measurements
/// on Linux.
struct MixerMemory {
    let mixer: Mixer
    /// The model's width.
    let hiddenSize: Int
    let length: Int
    /// Tokens of a segment; all where the mixer does not go by segments.
    let segment: Int
    /// The size of a stored number, in bytes.
    let itemSize: Int

    /// One array `[T, features]`.
    func activation(_ features: Int) -> Int { length * features * itemSize }
    private var hidden: Int { activation(hiddenSize) }
    /// mixed
    var mixed: Int { activation(mixer.mixedSize(hidden: hiddenSize)) }

    private var isFused: Bool { CPUProducts.current.fuses }

    private var isCut: Bool { segment < length && mixer.goesBySegments }
    /// Of an array `[T, …]`, a segment's part.
    private func ofSegment(_ bytes: Int) -> Int { bytes / length * segment }

    /// The arrays that the backward pass reads: m₁, m₂, m₃ and mixed; of segments, k̂, v and mixed of attention, and the states of a gated delta net.
    var intermediates: Int {
        guard isCut else { return whole }
        switch mixer {
        case .attention(let a): return activation(2 * a.keyValueWidth) + mixed
        case .gatedDeltaNet(let net):
            let state = 4 * net.valueWidth * net.keyHeadDim + itemSize * (net.kernelSize - 1) * net.convolutionWidth
            return (length + segment - 1) / segment * state
        case .shortConvolution, .mamba2: return whole
        }
    }

    /// m₁, m₂, m₃ and mixed.
    var whole: Int {
        switch mixer {
        case .attention(let a):
            activation(2 * a.queryWidth + a.numAttentionHeads * a.gateDim + 2 * a.keyValueWidth)
        case .gatedDeltaNet(let net):
            activation(net.convolutionWidth + 2 * net.valueWidth + 2 * net.numValueHeads)
        case .shortConvolution: 4 * hidden
        case .mamba2(let mamba): activation(2 * mamba.width + mamba.convolutionWidth + mamba.numHeads)
        }
    }

    /// In the block function, besides its input and output.
    var forward: Int {
        switch mixer {
        case .attention(let a):
            (isCut ? activation(2 * a.keyValueWidth) + intermediates : 0)
                + ofSegment(whole + (a.qkNorm ? 4 * mixed : 0))
        case .gatedDeltaNet: (isCut ? intermediates : 0) + ofSegment(whole)
        case .shortConvolution, .mamba2: whole
        }
    }

    /// In the derivative, with d_x_mid.
    func backward(_ tile: TileSizes) -> Int {
        switch mixer {
        case .attention(let a):
            let queries = min(tile.attention, length)
            let scores = a.numAttentionHeads * queries * length * 4
            // x and d_x_mid; q, attn_out, d_attn_out, q̂ and the tiles of dq; k, v, k̂, v in float32 and the tiles of dk and dv, these
            // before and after a tile; of the tile, P, dP and dS, and dP − rowsum(P ∘ dP) where that is not fused with dS.
            let arrays = 5 * mixed + 9 * activation(a.keyValueWidth)
            guard isCut else { return 2 * hidden + arrays + (isFused ? 3 : 4) * scores }
            // d_x_mid, which dx replaces; k̂ and v, and attn_out but for the last segment's, which went first; the sums of dk and dv before
            // and after a tile, of the positions before the last segment that its rows see; a segment's.
            let seen = min(length - segment, (a.slidingWindow ?? length) + segment)
            return hidden + intermediates - ofSegment(mixed) + activation(4 * a.keyValueWidth) / length * seen
                + (isFused ? 3 : 4) * scores
                + ofSegment(hidden + arrays + activation(2 * a.numAttentionHeads * a.gateDim))
        case .gatedDeltaNet:
            return isCut
                ? hidden + intermediates + ofSegment(2 * whole + 3 * hidden) : 2 * intermediates + 3 * hidden
        case .shortConvolution: return (isFused ? 11 : 13) * hidden
        case .mamba2(let mamba):
            let (_, array) = Mamba2.tile(
                headsOfGroup: mamba.numHeads / mamba.numGroups, headDim: mamba.headDim, stateSize: mamba.stateSize,
                length: length, bytes: tile.bytes)
            return max(
                // x and d_x_mid; do, dz, xBC and the parts of its gradient; a tile's arrays.
                2 * hidden + activation(2 * (mamba.width + mamba.convolutionWidth)) + 13 * array,
                // x, d_x_mid and its part; z, o, mixed, dy, do and dz; xBC.
                3 * hidden + activation(6 * mamba.width + mamba.convolutionWidth))
        }
    }

    /// On a GPU, ten times what its derivative takes besides its tiles; fitted to what docs/ledger.md counts.
    var tenGPUPhases: Int {
        switch mixer {
        case .attention(let a): 142 * activation(a.queryWidth) + 157 * activation(a.keyValueWidth)
        case .gatedDeltaNet: 40 * intermediates
        case .shortConvolution: 40 * intermediates
        case .mamba2: 40 * intermediates
        }
    }
}
