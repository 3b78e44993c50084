import MeSPBundle

/// The memory of a mixer's arrays for a sequence, in bytes.
extension Planner {
    /// The number of tokens in a mixer's segment; the number of all tokens if mixers take no segments.
    private var segment: Int { Machine.mixerTokens(architecture, length, manifest.device.processor) }

    /// Returns the bytes of a segment's part of an array `[T, …]`.
    func inSegment(_ bytes: Int) -> Int { isCut ? bytes / length * segment : bytes }
    /// Returns the bytes of all other segments' parts of an array `[T, …]`.
    private func inOthers(_ bytes: Int) -> Int { bytes - inSegment(bytes) }

    /// Whether all mixers take segments.
    var isCut: Bool { segment < length && architecture.mixers.allSatisfy(\.goesBySegments) }

    /// Returns the bytes of the input of a mixer's last projection.
    func lastInput(of mixer: Mixer) -> Int { activation(mixer.mixerWidth(hidden: architecture.hiddenSize)) }

    /// Returns the bytes of the arrays that the backward pass reads: the arrays of `MixerIntermediates`. With segments, the backward pass instead
    /// reads k̂, v̂ and attn_out of attention, or the states of a gated delta net.
    func intermediates(of mixer: Mixer) -> Int {
        switch mixer {
        case .attention(let a) where isCut: activation(2 * a.keyValueWidth) + lastInput(of: mixer)
        case .gatedDeltaNet(let net) where isCut: (length + segment - 1) / segment * state(net)
        default: whole(mixer)
        }
    }

    /// Returns the bytes of a gated delta net's state: S and the last rows of qkv.
    private func state(_ net: GatedDeltaNetMixer) -> Int {
        4 * net.valueWidth * net.keyHeadDim + itemSize * (net.kernelSize - 1) * net.convolutionWidth
    }

    /// Returns the bytes of the arrays of `MixerIntermediates`.
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

    /// Returns the bytes of a mixer's forward pass, besides the block's input and output.
    func forwardBytes(of mixer: Mixer) -> Int {
        let others = isCut ? intermediates(of: mixer) : 0
        guard case .attention(let a) = mixer else { return others + inSegment(whole(mixer)) }
        // While attention runs, q̂, k̂, v̂ and the tiles of attn_out take the place of x, x_mid and y.
        let running = machineMemory.outputs(a) * lastInput(of: mixer) + activation(2 * a.keyValueWidth)
        return inOthers(activation(2 * a.keyValueWidth)) + others
            + inSegment(whole(mixer) + max(0, running - 3 * hidden))
    }

    /// Returns the bytes of a mixer's derivative, including d_x_mid.
    func backward(of mixer: Mixer, _ machine: Machine) -> Int {
        let others = isCut ? intermediates(of: mixer) : 0
        switch mixer {
        case .attention(let a):
            // The arrays for all tokens are d_x_mid and, with segments, k̂, v̂ and attn_out. The arrays for the positions that a segment sees are the
            // sums of dk and dv before and after a tile. The arrays for a segment are k, v, k̂, dk, dv, the gates and their gradient, q, d_attn_out
            // and dq. In addition, there are either dq after RoPE and the norm, in parts and by token, or q̂ and the scores.
            let attnOut = lastInput(of: mixer)
            let (keys, gates) = (activation(a.keyValueWidth), activation(2 * a.numAttentionHeads * a.gateDim))
            let seen = min(length, (a.slidingWindow ?? length) + segment)
            return hidden + inOthers(others + 4 * keys / length * seen)
                + inSegment(5 * keys + 4 * attnOut + gates)
                + max(inSegment(attnOut), machineMemory.scores(a, machine, length: length))
        // The arrays are d_x_mid, do, dz, qkv, the parts of qkv's gradient, and the arrays of a tile.
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
                // The state space model's derivative holds x, d_x_mid, do, dz, xBC, the parts of xBC's gradient, and the arrays of a tile.
                2 * hidden + activation(2 * (mamba.width + mamba.convolutionWidth)) + 13 * array,
                // The gated norm's derivative holds x, d_x_mid and a part of it, z, o, the norm, dy or do, dz, and xBC.
                3 * hidden + activation(5 * mamba.width + mamba.convolutionWidth))
        case .shortConvolution: return (11 + 2 * machineMemory.unfused) * hidden
        }
    }

    /// Returns the bytes that automatic differentiation keeps. For attention they include the scores and P of all heads.
    func automatic(of mixer: Mixer) -> Int {
        switch mixer {
        case .attention(let a): 2 * a.numAttentionHeads * length * length * 4 + 7 * whole(mixer)
        case .gatedDeltaNet: 7 * whole(mixer)
        case .shortConvolution: 5 * whole(mixer)
        case .mamba2: 15 * whole(mixer)
        }
    }
}
