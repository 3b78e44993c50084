import MeSPBundle

extension Planner {
    private var segment: Int { Schedule.mixerTokens(architecture, length, settings.processor) }

    func inSegment(_ bytes: Int) -> Int { isCut ? bytes / length * segment : bytes }
    private func inOthers(_ bytes: Int) -> Int { bytes - inSegment(bytes) }

    var isCut: Bool { segment < length && architecture.mixers.allSatisfy(\.goesBySegments) }

    func lastInput(of mixer: Mixer) -> Int { activation(mixer.mixerWidth(hidden: architecture.hiddenSize)) }

    /// Returns the bytes of the mixer's arrays that the backward pass reads. With segments, these are k̂, v̂ and attn_out of attention, or the states
    /// of a gated delta net.
    func intermediates(of mixer: Mixer) -> Int {
        switch mixer {
        case .attention(let a) where isCut: activation(2 * a.keyValueWidth) + lastInput(of: mixer)
        case .gatedDeltaNet(let net) where isCut: (length + segment - 1) / segment * state(net)
        default: whole(mixer)
        }
    }

    private func state(_ net: GatedDeltaNetMixer) -> Int {
        4 * net.valueWidth * net.keyHeadDim + itemSize * (net.kernelSize - 1) * net.convolutionWidth
    }

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

    func forwardBytes(of mixer: Mixer) -> Int {
        let others = isCut ? intermediates(of: mixer) : 0
        guard case .attention(let a) = mixer else { return others + inSegment(whole(mixer)) }
        // While attention runs, k̂, v̂ and further arrays of attn_out's size take the place of x, x_mid and y.
        let running = processorMemory.outputs(a) * lastInput(of: mixer) + activation(2 * a.keyValueWidth)
        return inOthers(activation(2 * a.keyValueWidth)) + others
            + inSegment(whole(mixer) + max(0, running - 3 * hidden))
    }

    /// Returns the bytes of a mixer's backward pass, including d_x_mid.
    func backward(of mixer: Mixer, _ schedule: Schedule) -> Int {
        let others = isCut ? intermediates(of: mixer) : 0
        switch mixer {
        case .attention(let a):
            // The terms are d_x_mid, the other segments' arrays with the sums of dk and dv, this segment's arrays, and the larger of dq after RoPE
            // and the scores.
            let attnOut = lastInput(of: mixer)
            let (keys, gates) = (activation(a.keyValueWidth), activation(2 * a.numAttentionHeads * a.gateDim))
            let seen = min(length, (a.slidingWindow ?? length) + segment)
            return hidden + inOthers(others + 4 * keys / length * seen)
                + inSegment(5 * keys + 4 * attnOut + gates)
                + max(inSegment(attnOut), processorMemory.scores(a, schedule, length: length))
        // The arrays are d_x_mid, the states (with segments), do, dz, qkv, qkv's gradient, and the arrays of a tile.
        case .gatedDeltaNet(let net):
            let ofHead = GatedDeltaNet.arrayBytes(
                keyDim: net.keyHeadDim, valueDim: net.valueHeadDim,
                valueHeadsOfKey: net.numValueHeads / net.numKeyHeads, length: isCut ? segment : length)
            let array = min(net.numKeyHeads, max(1, schedule.bytes / 3 / ofHead)) * ofHead
            return hidden + others + inSegment(activation(2 * (net.valueWidth + net.convolutionWidth))) + 25 * array
        case .mamba2(let mamba):
            let ofHead = Mamba2.arrayBytes(headDim: mamba.headDim, stateSize: mamba.stateSize, length: length)
            let array = min(mamba.numHeads / mamba.numGroups, max(1, schedule.bytes / 2 / ofHead)) * ofHead
            return max(
                // The state space model's backward pass holds x, d_x_mid, do, dz, xBC, xBC's gradient, and the arrays of a tile.
                2 * hidden + activation(2 * (mamba.width + mamba.convolutionWidth)) + 13 * array,
                // The gated norm's backward pass holds x, two arrays for d_x_mid, z, o, the norm, do, dz, and xBC.
                3 * hidden + activation(5 * mamba.width + mamba.convolutionWidth))
        case .shortConvolution: return (11 + 2 * processorMemory.unfused) * hidden
        }
    }

    func automatic(of mixer: Mixer) -> Int {
        switch mixer {
        case .attention(let a): 2 * a.numAttentionHeads * length * length * 4 + 7 * whole(mixer)
        case .gatedDeltaNet: 7 * whole(mixer)
        case .shortConvolution: 5 * whole(mixer)
        case .mamba2: 15 * whole(mixer)
        }
    }
}
