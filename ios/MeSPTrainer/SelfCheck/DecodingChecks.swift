import Foundation
import MLX
import MeSPCore

/// Compares the output for one token at a time, as in generation, with the output for all tokens at once. A GPU uses different kernels for one row
/// and for many rows.
extension CheckSuite {
    typealias Fields = [String: any Sendable]

    static let mixers: [(name: String, variants: KeyValuePairs<String, Fields>)] = [
        (
            "attention",
            [
                "rotary": attention,
                "no rotary": attention.merging(["frequencies": [Double]()]) { $1 },
                "partial rotary": attention.merging(["frequencies": frequencies(8)]) { $1 },
                "pairs that stay": attention.merging(["frequencies": frequencies(8) + [0, 0, 0, 0, 0, 0, 0, 0]]) { $1 },
                "scaled rotary": attention.merging(["rope_scale": 1.25]) { $1 },
                "grouped heads": attention.merging(["num_key_value_heads": 2]) { $1 },
                "QK-norm": attention.merging(["qk_norm": true]) { $1 },
                "output gate": attention.merging(["output_gate": true]) { $1 },
                "gate of a head": attention.merging(["modules": modules(ofAttention + headGate)]) { $1 },
                "sliding window": attention.merging(["sliding_window": 7]) { $1 },
                "norm of v": attention.merging(["v_norm": true]) { $1 },
                "capped": attention.merging(["attn_logit_softcapping": 3]) { $1 },
            ]
        ),
        (
            "gated_delta_net",
            [
                "one value head": gatedDeltaNet,
                "several value heads": gatedDeltaNet.merging(["num_key_heads": 2]) { $1 },
            ]
        ),
        (
            "short_convolution",
            [
                "three tokens": [
                    "type": "short_convolution", "kernel_size": 3,
                    "modules": modules([("conv.in_proj", "in"), ("conv.out_proj", "out")]),
                ]
            ]
        ),
        ("mamba2", ["two groups": mamba2, "one group": mamba2.merging(["num_groups": 1]) { $1 }]),
    ]

    private static let mamba2: Fields = [
        "type": "mamba2", "num_heads": 4, "head_dim": 16, "num_groups": 2, "state_size": 32, "kernel_size": 4,
        "norm_eps": 1e-5, "modules": modules([("mamba.in_proj", "in"), ("mamba.out_proj", "out")]),
    ]

    /// Attention with four heads of 32 features. The scores have a variance of 4. With a small variance all attention weights would be nearly equal.
    private static let attention: Fields = [
        "type": "attention", "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "qk_norm": false,
        "output_gate": false, "attention_scale": 2 / 32.0.squareRoot(), "frequencies": frequencies(16),
        "rope_scale": 1, "modules": modules(ofAttention), "v_norm": false,
    ]

    private static let ofAttention = [
        ("self_attn.q_proj", "q"), ("self_attn.k_proj", "k"), ("self_attn.v_proj", "v"), ("self_attn.o_proj", "o"),
    ]

    private static let headGate = [("self_attn.g_proj", "g")]

    private static let gatedDeltaNet: Fields = [
        "type": "gated_delta_net", "num_key_heads": 4, "num_value_heads": 4, "key_head_dim": 16,
        "value_head_dim": 32, "kernel_size": 4,
        "modules": modules([
            ("linear_attn.in_proj_qkv", "qkv"), ("linear_attn.in_proj_z", "z"), ("linear_attn.in_proj_b", "b"),
            ("linear_attn.in_proj_a", "a"), ("linear_attn.out_proj", "out"),
        ]),
    ]

    private static func modules(_ names: [(String, String)]) -> [[any Sendable]] {
        names.map { [$0, [$1]] }
    }

    private static func frequencies(_ count: Int) -> [Double] {
        (0..<count).map { pow(10000, -Double($0) / Double(count)) }
    }

    /// The number of tokens. It exceeds the chunk size of recurrent mixers and the sliding window.
    private static let decoded = ChunkDecays.chunk + 6

    func checkDecoding(_ name: String, _ variants: KeyValuePairs<String, Fields>) throws -> Finding {
        let errors = try variants.flatMap { variant, mixer in
            try atBlock()
            let folder = Self.temporaryFolder.appendingPathComponent("tiny.\(UUID().uuidString)")
            defer { try? FileManager.default.removeItem(at: folder) }
            let tiny = try TinyBundle(mixer: mixer).write(to: folder, like: bundle)
            let model = try CachedModel(tiny)
            let (whole, single) = (try read(model, pieces: Self.decoded), try read(model, pieces: 1))
            return try [
                Measurement("\(variant): y", error(tamper("decode.\(name)", single.y), whole.y)),
                Measurement("\(variant): logits", error(single.logits, whole.logits)),
                Measurement("\(variant): state", worst(zip(single.state, whole.state).map(error))),
            ]
        }
        return compare(
            "The outputs and the state of a block, one token at a time,", with: "those of all tokens at once", errors)
    }

    private func read(_ model: CachedModel, pieces: Int) throws -> (y: MLXArray, logits: MLXArray, state: [MLXArray]) {
        let tokens = (0..<Self.decoded).map { ($0 * 7919 + 17) % TinyBundle.vocabulary }
        var (cache, outputs, logits) = (PromptCache(), [MLXArray](), [MLXArray]())
        for piece in tiles(of: tokens.count, size: pieces) {
            try model.forward(tokens[piece], &cache, atBlock) { _, y in
                outputs.append(y)
                try model.bundle.withHead {
                    let head = CrossEntropyHead(
                        weights: $0, architecture: model.bundle.architecture, schedule: Schedule(model.bundle.processor)
                    )
                    logits.append(head.logits(y))
                    eval(logits)
                }
            }
        }
        return (concatenated(outputs), concatenated(logits), cache.blocks.flatMap { $0?.arrays ?? [] })
    }
}
