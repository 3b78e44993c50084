import MeSPFiles

package enum Mixer: Sendable, Equatable {
    case attention(AttentionMixer)
    case gatedDeltaNet(GatedDeltaNetMixer)
    case shortConvolution(ShortConvolutionMixer)
    case mamba2(Mamba2Mixer)
}

/// Causal softmax attention. `norm` is present with `qkNorm`, `cap(s) = c tanh(s / c)` with `attnLogitSoftcapping`, and `∘ σ(g)` with gates:
///
///     q̂, k̂ = RoPE(norm(q)), RoPE(norm(k))
///     attn_out = softmax(mask(cap(q̂ k̂ᵀ · scale))) v
///     x_mid = x + o(attn_out ∘ σ(g))
package struct AttentionMixer: Decodable, Sendable, Equatable {
    let modules: [Module]
    package let numAttentionHeads: Int
    package let numKeyValueHeads: Int
    package let headDim: Int
    package let qkNorm: Bool
    /// Whether q contains, for each head, the query followed by an output gate g of the same size.
    package let outputGate: Bool
    package let attentionScale: Float
    package let attnLogitSoftcapping: Float?
    /// RoPE's angle per position for each pair of dimensions, in radians. A pair with angle 0 is not rotated. The list is empty without RoPE.
    package let frequencies: [Float]
    package let ropeScale: Float
    /// The number of positions that a query attends to, including its own, or nil for all positions up to its own.
    package let slidingWindow: Int?
    /// Whether v goes through an RMSNorm without weights.
    package let vNorm: Bool
    /// The index of the block whose keys and values this block reuses, or nil if it has its own.
    package let keysOf: Int?

    package var queryWidth: Int { numAttentionHeads * headDim }
    package var keyValueWidth: Int { numKeyValueHeads * headDim }
    package var headGate: Bool { modules.contains { $0.projections.contains(.g) } }
    package var gateDim: Int { outputGate ? headDim : headGate ? 1 : 0 }
}

/// The gated delta rule ([Yang et al.](https://arxiv.org/abs/2412.06464)).
package struct GatedDeltaNetMixer: Decodable, Sendable, Equatable {
    let modules: [Module]
    package let numKeyHeads: Int
    package let numValueHeads: Int
    package let keyHeadDim: Int
    package let valueHeadDim: Int
    package let kernelSize: Int

    var keyWidth: Int { numKeyHeads * keyHeadDim }
    package var valueWidth: Int { numValueHeads * valueHeadDim }
    package var convolutionWidth: Int { 2 * keyWidth + valueWidth }
}

/// A gated causal convolution. One projection computes b, c and u of equal size:
///
///     x_mid = x + out(c ∘ conv(b ∘ u))
package struct ShortConvolutionMixer: Decodable, Sendable, Equatable {
    let modules: [Module]
    let kernelSize: Int
}

/// The Mamba-2 state-space model ([Dao & Gu](https://arxiv.org/abs/2405.21060)). One projection computes z, xBC and dt.
package struct Mamba2Mixer: Decodable, Sendable, Equatable {
    let modules: [Module]
    package let numHeads: Int
    package let headDim: Int
    package let numGroups: Int
    package let stateSize: Int
    let kernelSize: Int
    package let normEps: Float

    package var width: Int { numHeads * headDim }
    package var convolutionWidth: Int { width + 2 * numGroups * stateSize }
}

extension Mixer {
    var modules: [Module] {
        switch self {
        case .attention(let mixer): mixer.modules
        case .gatedDeltaNet(let mixer): mixer.modules
        case .shortConvolution(let mixer): mixer.modules
        case .mamba2(let mixer): mixer.modules
        }
    }

    func dimensions(_ projection: Projection, hidden: Int) -> (inputs: Int, outputs: Int)? {
        switch (self, projection) {
        case (.attention(let mixer), .q): (hidden, mixer.queryWidth * (mixer.outputGate ? 2 : 1))
        case (.attention(let mixer), .k) where mixer.keysOf == nil,
            (.attention(let mixer), .v) where mixer.keysOf == nil:
            (hidden, mixer.keyValueWidth)
        case (.attention(let mixer), .g) where mixer.headGate: (hidden, mixer.numAttentionHeads)
        case (.attention(let mixer), .o): (mixer.queryWidth, hidden)
        case (.gatedDeltaNet(let mixer), .qkv): (hidden, mixer.convolutionWidth)
        case (.gatedDeltaNet(let mixer), .z): (hidden, mixer.valueWidth)
        case (.gatedDeltaNet(let mixer), .a), (.gatedDeltaNet(let mixer), .b): (hidden, mixer.numValueHeads)
        case (.gatedDeltaNet(let mixer), .out): (mixer.valueWidth, hidden)
        case (.shortConvolution, .in): (hidden, 3 * hidden)
        case (.shortConvolution, .out): (hidden, hidden)
        case (.mamba2(let mixer), .in): (hidden, mixer.width + mixer.convolutionWidth + mixer.numHeads)
        case (.mamba2(let mixer), .out): (mixer.width, hidden)
        default: nil
        }
    }

    package func mixerWidth(hidden: Int) -> Int {
        switch self {
        case .attention(let mixer): mixer.queryWidth
        case .gatedDeltaNet(let mixer): mixer.valueWidth
        case .shortConvolution: hidden
        case .mamba2(let mixer): mixer.width
        }
    }

    func arrays(hidden: Int) -> [Weight] {
        switch self {
        case .attention(let mixer):
            (!mixer.qkNorm ? [] : mixer.keysOf == nil ? ["q_norm", "k_norm"] : ["q_norm"])
                .map { Weight(name: "self_attn.\($0).weight", shape: [mixer.headDim]) }
        case .gatedDeltaNet(let mixer):
            [
                Weight(name: "linear_attn.conv1d.weight", shape: [mixer.convolutionWidth, mixer.kernelSize]),
                Weight(name: "linear_attn.norm.weight", shape: [mixer.valueHeadDim]),
                Weight(name: "linear_attn.dt_bias", shape: [mixer.numValueHeads]),
                Weight(name: "linear_attn.A_log", shape: [mixer.numValueHeads], isFloat32: true),
            ]
        case .shortConvolution(let mixer):
            [Weight(name: "conv.conv.weight", shape: [hidden, mixer.kernelSize])]
        case .mamba2(let mixer):
            [
                Weight(name: "mamba.conv1d.weight", shape: [mixer.convolutionWidth, mixer.kernelSize]),
                Weight(name: "mamba.conv1d.bias", shape: [mixer.convolutionWidth]),
                Weight(name: "mamba.norm.weight", shape: [mixer.width]),
            ]
                + ["dt_bias", "A_log", "D"].map {
                    Weight(name: "mamba.\($0)", shape: [mixer.numHeads], isFloat32: true)
                }
        }
    }

    func isConsistent(hidden: Int) -> Bool {
        func areCounts(_ numbers: [Int]) -> Bool { numbers.allSatisfy { (1...(1 << 12)).contains($0) } }
        func areWidths(_ numbers: [Int]) -> Bool { numbers.allSatisfy { (1...(1 << 20)).contains($0) } }
        switch self {
        case .attention(let mixer):
            let factors = [mixer.attentionScale, mixer.ropeScale, mixer.attnLogitSoftcapping].compactMap { $0 }
            return areCounts([mixer.numAttentionHeads, mixer.numKeyValueHeads, mixer.headDim])
                && areWidths([mixer.queryWidth * (mixer.outputGate ? 2 : 1), mixer.keyValueWidth])
                && !(mixer.outputGate && mixer.headGate)
                && mixer.numAttentionHeads % mixer.numKeyValueHeads == 0
                && factors.allSatisfy { Bounds.numbers.contains(Double($0)) }
                && mixer.frequencies.allSatisfy { $0 == 0 || Bounds.numbers.contains(Double($0)) }
                && mixer.frequencies.count * 2 <= mixer.headDim && (1...(1 << 30)).contains(mixer.slidingWindow ?? 1)
        case .gatedDeltaNet(let mixer):
            return areCounts([mixer.numKeyHeads, mixer.numValueHeads, mixer.keyHeadDim, mixer.valueHeadDim])
                && areCounts([mixer.kernelSize]) && areWidths([mixer.convolutionWidth])
                && mixer.numValueHeads % mixer.numKeyHeads == 0
        case .shortConvolution(let mixer):
            return areCounts([mixer.kernelSize])
        case .mamba2(let mixer):
            return areCounts([mixer.numHeads, mixer.headDim, mixer.numGroups, mixer.stateSize, mixer.kernelSize])
                && areWidths([mixer.width + mixer.convolutionWidth + mixer.numHeads])
                && mixer.numHeads % mixer.numGroups == 0 && mixer.normEps.isFinite && mixer.normEps > 0
        }
    }
}

extension Mixer: Decodable {
    package init(from decoder: any Decoder) throws {
        enum Key: String, CodingKey { case type }
        enum Kind: String, Decodable {
            case attention
            case gatedDeltaNet = "gated_delta_net"
            case shortConvolution = "short_convolution"
            case mamba2
        }
        self =
            switch try decoder.container(keyedBy: Key.self).decode(Kind.self, forKey: .type) {
            case .attention: .attention(try AttentionMixer(from: decoder))
            case .gatedDeltaNet: .gatedDeltaNet(try GatedDeltaNetMixer(from: decoder))
            case .shortConvolution: .shortConvolution(try ShortConvolutionMixer(from: decoder))
            case .mamba2: .mamba2(try Mamba2Mixer(from: decoder))
            }
    }
}
