import MeSPBundle

/// The memory of a mixer's arrays for a sequence, in bytes. Counts of arrays follow the code; the few constants were fitted to measurements
/// on Linux.
extension Planner {
    /// The features that a mixer's last projection takes.
    func mixed(of mixer: Mixer) -> Int { activation(mixer.mixedSize(hidden: architecture.hiddenSize)) }

    /// Whether it goes by segments.
    func isCut(_ mixer: Mixer) -> Bool { segment < length && mixer.goesBySegments }

    /// Of an array `[T, …]`, a segment's part.
    func ofSegment(_ bytes: Int) -> Int { bytes / length * segment }

    /// The arrays that the backward pass reads: m₁, m₂, m₃ and mixed; of segments, k̂, v and mixed of attention, and the states of a gated delta net.
    func intermediates(of mixer: Mixer) -> Int {
        guard isCut(mixer) else { return whole(mixer) }
        switch mixer {
        case .attention(let a): return activation(2 * a.keyValueWidth) + mixed(of: mixer)
        case .gatedDeltaNet(let net):
            let state = 4 * net.valueWidth * net.keyHeadDim + itemSize * (net.kernelSize - 1) * net.convolutionWidth
            return (length + segment - 1) / segment * state
        case .shortConvolution, .mamba2: return whole(mixer)
        }
    }

    /// m₁, m₂, m₃ and mixed.
    private func whole(_ mixer: Mixer) -> Int {
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
    func forward(of mixer: Mixer) -> Int {
        switch mixer {
        case .attention(let a):
            // While attention runs, also q̂, k̂ and v̂, and the tiles that mixed is joined of, in the place of x, x_mid and y.
            let running = (isOneOperation(a) ? 1 : 2) * mixed(of: mixer) + activation(2 * a.keyValueWidth)
            return (isCut(mixer) ? activation(2 * a.keyValueWidth) + intermediates(of: mixer) : 0)
                + ofSegment(whole(mixer) + max(0, running - 3 * hidden))
        case .gatedDeltaNet: return (isCut(mixer) ? intermediates(of: mixer) : 0) + ofSegment(whole(mixer))
        case .shortConvolution, .mamba2: return whole(mixer)
        }
    }

    /// In the derivative, with d_x_mid.
    func backward(of mixer: Mixer, _ tile: Machine) -> Int {
        let (isCut, isFused) = (isCut(mixer), Processor.cpu.fuses)
        let (mixed, whole, intermediates) = (mixed(of: mixer), whole(mixer), intermediates(of: mixer))
        switch mixer {
        case .attention(let a):
            let keys = activation(a.keyValueWidth)
            // Of tiles also the sums of dk and dv before and after one.
            let (scores, sums) = isOneOperation(a) ? (operation(a), 0) : (scores(a, tile), 4 * keys)
            guard isCut else {
                // q, q̂, d_attn_out, dq, dk and dv, and scores; then q, d_attn_out and dq, before RoPE and the norm, behind them in parts,
                // and by token. With either d_x_mid; k, v, k̂, and v̂ where it is not v.
                let phases = max(4 * mixed + 2 * keys + sums + scores, 5 * mixed + 2 * keys)
                return hidden + (a.vNorm ? 4 : 3) * keys + phases
            }
            // d_x_mid, which dx replaces; k̂ and v, and attn_out but for the last segment's, which went first; the sums of dk and dv before
            // and after a tile, of the positions before the last segment that its rows see; P and dP; of a segment x; q, d_attn_out, q̂ and
            // the tiles of dq; k, v, k̂, v, the tiles of dk and dv, and their sums before and after a tile.
            let seen = min(length - segment, (a.slidingWindow ?? length) + segment)
            return hidden + intermediates - ofSegment(mixed) + 4 * keys / length * seen + scores
                + ofSegment(hidden + 4 * mixed + 9 * keys + activation(2 * a.numAttentionHeads * a.gateDim))
        case .gatedDeltaNet:
            return isCut
                ? hidden + intermediates + ofSegment(2 * whole + 3 * hidden) : 2 * intermediates + 3 * hidden
        case .shortConvolution: return (isFused ? 11 : 13) * hidden
        case .mamba2(let mamba):
            let ofHead = Mamba2.arrayBytes(headDim: mamba.headDim, stateSize: mamba.stateSize, length: length)
            let array = min(mamba.numHeads / mamba.numGroups, max(1, tile.bytes / (2 * ofHead))) * ofHead
            return max(
                // x and d_x_mid; do, dz, xBC and the parts of its gradient; a tile's arrays.
                2 * hidden + activation(2 * (mamba.width + mamba.convolutionWidth)) + 13 * array,
                // x, d_x_mid and its part; z, o, mixed, dy, do and dz; xBC.
                3 * hidden + activation(6 * mamba.width + mamba.convolutionWidth))
        }
    }

    /// See `Attention`.
    private func isOneOperation(_ a: AttentionMixer) -> Bool {
        Processor.cpu.attendsByTiles && a.attnLogitSoftcapping == nil
    }

    /// Of a tile of attention's query rows P and dP, in whose place dS comes where it is fused, or P ∘ dP and its difference too.
    private func scores(_ a: AttentionMixer, _ tile: Machine) -> Int {
        let heads = a.numAttentionHeads / a.numKeyValueHeads * min(tile.keyHeads, a.numKeyValueHeads)
        return (Processor.cpu.fuses ? 2 : 4) * heads * min(tile.attention, length) * length * 4
    }

    /// What HostMLX's operation (Attention.cpp) has in place of them: the same of the rows that go through the keys together, of some
    /// groups of heads, with their q and dO; of each part of the keys, what it adds to dq.
    private func operation(_ a: AttentionMixer) -> Int {
        let perGroup = a.numAttentionHeads / a.numKeyValueHeads
        let parts = (perGroup + 7) / 8
        let heads = (perGroup + parts - 1) / parts
        let rows = 16 * heads * max(1, 4 / heads) * min(max(2048 / length, 1), a.numKeyValueHeads)
        return rows * (2 * length + (4 + min(16, (length + 127) / 128)) * a.headDim) * 4
    }

    /// On a GPU, ten times what its derivative takes besides its tiles; fitted to what docs/ledger.md counts.
    func tenGPUPhases(of mixer: Mixer) -> Int {
        if case .attention(let a) = mixer {
            142 * activation(a.queryWidth) + 157 * activation(a.keyValueWidth)
        } else {
            40 * intermediates(of: mixer)
        }
    }

    /// The bytes that automatic differentiation keeps.
    func automatic(of mixer: Mixer) -> Int {
        switch mixer {
        case .attention(let a):
            // The scores and P of all heads; and of QK-norm.
            2 * a.numAttentionHeads * length * length * 4
                + (a.qkNorm ? 13 * activation(a.queryWidth + a.keyValueWidth) : 0)
        case .gatedDeltaNet, .mamba2: 10 * whole(mixer)
        case .shortConvolution: 3 * whole(mixer)
        }
    }
}
