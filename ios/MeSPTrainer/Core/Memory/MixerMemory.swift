/// The memory of a mixer's arrays for a sequence, in bytes. Counts of arrays follow the code; the few constants were fitted to measurements
/// on Linux.
struct MixerMemory {
    let mixer: Mixer
    /// The model's width.
    let hiddenSize: Int
    let length: Int
    /// The size of a stored number, in bytes.
    let itemSize: Int

    /// One array `[T, features]`.
    func activation(_ features: Int) -> Int { length * features * itemSize }
    private var hidden: Int { activation(hiddenSize) }
    /// mixed
    var mixed: Int { activation(mixer.mixedSize(hidden: hiddenSize)) }

    private var isFused: Bool { CPUProducts.current.fuses }

    /// m₁, m₂, m₃ and mixed, which the backward pass reads.
    var intermediates: Int {
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
            intermediates + (a.qkNorm ? 4 * mixed : 0)
        case .gatedDeltaNet: intermediates
        case .shortConvolution: intermediates
        case .mamba2: intermediates
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
            return 2 * hidden + 5 * mixed + 9 * activation(a.keyValueWidth) + (isFused ? 3 : 4) * scores
        case .gatedDeltaNet: return 2 * intermediates + 3 * hidden
        case .shortConvolution: return (isFused ? 11 : 13) * hidden
        case .mamba2(let mamba):
            let (_, array) = Mamba2.tile(
                headsOfGroup: mamba.numHeads / mamba.numGroups, headDim: mamba.headDim, stateSize: mamba.stateSize,
                length: length, bytes: tile.bytes)
            // x and d_x_mid; do, dz, xBC and the parts of its gradient; a tile's arrays.
            return 2 * hidden + activation(2 * (mamba.width + mamba.convolutionWidth)) + 13 * array
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
