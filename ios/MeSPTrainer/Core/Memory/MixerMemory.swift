import MeSPBundle

/// The memory of a mixer's arrays for a sequence, in bytes.
extension Planner {
    /// Tokens of a segment, of a mixer that goes by segments; all tokens where it does not.
    private var segment: Int { Machine.mixerTokens(architecture, length, manifest.device.processor) }

    /// Of an array `[T, …]`, a segment's part, and the others'.
    func inSegment(_ bytes: Int) -> Int { isCut ? bytes / length * segment : bytes }
    private func inOthers(_ bytes: Int) -> Int { bytes - inSegment(bytes) }

    /// Whether all mixers go by segments.
    var isCut: Bool { segment < length && architecture.mixers.allSatisfy(\.goesBySegments) }

    /// The input of a mixer's last projection.
    func lastInput(of mixer: Mixer) -> Int { activation(mixer.mixerWidth(hidden: architecture.hiddenSize)) }

    /// The arrays that the backward pass reads: those of `MixerIntermediates`; of segments, k̂, v and attn_out of attention, and the states of a gated delta net.
    func intermediates(of mixer: Mixer) -> Int {
        switch mixer {
        case .attention(let a) where isCut: activation(2 * a.keyValueWidth) + lastInput(of: mixer)
        case .gatedDeltaNet(let net) where isCut: (length + segment - 1) / segment * state(net)
        default: whole(mixer)
        }
    }

    /// S and the last rows of qkv.
    private func state(_ net: GatedDeltaNetMixer) -> Int {
        4 * net.valueWidth * net.keyHeadDim + itemSize * (net.kernelSize - 1) * net.convolutionWidth
    }

    /// Those of `MixerIntermediates`.
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

    /// In the forward pass, besides the block's input and output.
    func forwardBytes(of mixer: Mixer) -> Int {
        let others = isCut ? intermediates(of: mixer) : 0
        guard case .attention(let a) = mixer else { return others + inSegment(whole(mixer)) }
        // While attention runs, also q̂, k̂ and v̂, and the tiles that attn_out is joined of, in the place of x, x_mid and y.
        let running = machineMemory.outputs(a) * lastInput(of: mixer) + activation(2 * a.keyValueWidth)
        return inOthers(activation(2 * a.keyValueWidth)) + others
            + inSegment(whole(mixer) + max(0, running - 3 * hidden))
    }

    /// In the derivative, with d_x_mid.
    func backward(of mixer: Mixer, _ machine: Machine) -> Int {
        let others = isCut ? intermediates(of: mixer) : 0
        switch mixer {
        case .attention(let a):
            // All tokens: d_x_mid; by segments also k̂, v and attn_out.
            // The positions that a segment sees: the sums of dk and dv, before and after a tile.
            // A segment: k, v, k̂, dk and dv; the gates, and their gradient; q, d_attn_out and dq, and either dq after RoPE and the norm in
            // parts and by token, or q̂ and the scores.
            let attnOut = lastInput(of: mixer)
            let (keys, gates) = (activation(a.keyValueWidth), activation(2 * a.numAttentionHeads * a.gateDim))
            let seen = min(length, (a.slidingWindow ?? length) + segment)
            return hidden + inOthers(others + 4 * keys / length * seen)
                + inSegment(5 * keys + 4 * attnOut + gates)
                + max(inSegment(attnOut), machineMemory.scores(a, machine, length: length))
        // d_x_mid; do, dz, qkv and the parts of its gradient; a tile's arrays.
        case .gatedDeltaNet(let net):
            let ofHead = GatedDeltaNet.arrayBytes(
                keyDim: net.keyHeadDim, valueDim: net.valueHeadDim,
                valueHeadsOfKey: net.numValueHeads / net.numKeyHeads, length: isCut ? segment : length)
            let array = min(net.numKeyHeads, max(1, machine.bytes / 3 / ofHead)) * ofHead
            return hidden + others + inSegment(activation(2 * (net.valueWidth + net.convolutionWidth))) + 25 * array
        case .mamba2(let mamba):
            let ofHead = Mamba2.arrayBytes(headDim: mamba.headDim, stateSize: mamba.stateSize, length: length)
            let array = min(mamba.numHeads / mamba.numGroups, max(1, machine.bytes / 2 / ofHead)) * ofHead
            return max(
                // x and d_x_mid; do, dz, xBC and the parts of its gradient; a tile's arrays.
                2 * hidden + activation(2 * (mamba.width + mamba.convolutionWidth)) + 13 * array,
                // x, d_x_mid and its part; z, o, the norm, dy or do, and dz; xBC.
                3 * hidden + activation(5 * mamba.width + mamba.convolutionWidth))
        case .shortConvolution: return (11 + 2 * machineMemory.unfused) * hidden
        }
    }

    /// What automatic differentiation keeps; of attention also the scores and P of all heads.
    func automatic(of mixer: Mixer) -> Int {
        switch mixer {
        case .attention(let a): 2 * a.numAttentionHeads * length * length * 4 + 7 * whole(mixer)
        case .gatedDeltaNet: 7 * whole(mixer)
        case .shortConvolution: 5 * whole(mixer)
        case .mamba2: 15 * whole(mixer)
        }
    }
}
