import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

extension ConfigJSON {
    /// Returns the manifest's `architecture`, as JSON and decoded.
    ///
    /// - Parameters:
    ///   - isTied: whether the output projection is the embedding; nil for the value in config.json.
    func architecture(length: Int, isTied: Bool? = nil) throws -> (entry: JSONValue, architecture: Architecture) {
        let byLayer = try mixersByLayer(length: length)
        let mixers = byLayer.reduce(into: [JSONValue]()) { if !$0.contains($1) { $0.append($1) } }
        // The model's blocks compute x + c·out(norm(x)) with c = `residual`. With y = x/c, these blocks become y + out(norm(y)), without the factor
        // c. An RMS norm gives the same result for x and ε as for x/c and ε/c².
        let residual = try optional("residual_multiplier") ?? 1
        let hidden = try count("hidden_size")
        let scale = try family.embeddingScale(hidden: hidden) * (optional("embedding_multiplier") ?? 1)
        let count = byLayer.count
        var biased = Set(family.biases)
        if self["attention_bias"].isTruthy { biased.formUnion(PlainFamily.modules(family.attention)) }
        if self["mlp_bias"].isTruthy { biased.formUnion(PlainFamily.modules(family.mlp)) }
        let modules = PlainFamily.modules(family.attention) + PlainFamily.modules(family.mlp)
        let intermediate = try self.count("intermediate_size")
        let mlp = JSONValue.object(["modules": family.mlp, "intermediate_size": .integer(intermediate)])
        guard case .bool(let ties) = self["tie_word_embeddings"] else { throw unusable("tie_word_embeddings") }
        let cap = self["final_logit_softcapping"]
        let entry = JSONValue.object([
            "model_type": .string(modelType),
            "hidden_size": .integer(hidden),
            "vocab_size": .integer(try self.count("vocab_size")),
            "rms_norm_eps": .number(try positive("rms_norm_eps") / (residual * residual)),
            "tie_word_embeddings": .bool(isTied ?? ties),
            "hidden_act": .string(activation),
            "post_norms": .bool(family.postNorms),
            "final_logit_softcapping": cap == .null ? .null : .number(try positive("final_logit_softcapping")),
            "embedding_scale": .number(scale / residual),
            "logits_scaling": .number(try optional("logits_scaling") ?? 1),
            "mlx_prefix": .string(family.mlxPrefix),
            "hf_prefix": .string(family.hfPrefix),
            "biases": .array(modules.filter(biased.contains).map(JSONValue.string)),
            "mixers": .array(mixers),
            "layers": .array(byLayer.map { .integer(mixers.firstIndex(of: $0) ?? 0) }),
            "mlps": .array([mlp]),
            "mlp_layers": .array(Array(repeating: .integer(0), count: count)),
            "hf_modules": .array([]),
            "per_layer": .null,
        ])
        guard let made = try? JSONDecoder.snakeCase.decode(Architecture.self, from: Data(entry.json.utf8)),
            made.isConsistent
        else { throw unusable("sizes") }
        return (entry, made)
    }

    private func mixersByLayer(length: Int) throws -> [JSONValue] {
        let count = try count("num_hidden_layers")
        let every = try Self.periods.lazy.compactMap { try optional($0) }.first ?? family.fullEvery
        let types =
            try list("layer_types")
            ?? (1...count).map { block in
                let isFull = every.map { Double(block).truncatingRemainder(dividingBy: $0) == 0 } ?? false
                return .string(isFull ? "full_attention" : "sliding_attention")
            }
        var hasRoPE = Array(repeating: true, count: count)
        if family.hasNoRopeLayers {
            if let listed = try list("no_rope_layers") {
                hasRoPE = listed.map(\.isTruthy)
            } else {
                let interval = fields["no_rope_layer_interval"] == nil ? 4 : try self.count("no_rope_layer_interval")
                hasRoPE = (1...count).map { $0 % interval != 0 }
            }
        }
        var made = [Bool: [Bool: JSONValue]]()
        return try zip(types, hasRoPE).map { type, turns in
            guard let name = type.string, ["full_attention", "attention", "sliding_attention"].contains(name) else {
                throw unsupported("layer_types", type)
            }
            let slides = name == "sliding_attention"
            guard !slides || self["sliding_window"].isTruthy || family.fullEvery == nil else {
                throw unsupported("sliding_window", self["sliding_window"])
            }
            if let known = made[slides]?[turns] { return known }
            let mixer = try attention(slides: slides, turns: turns, length: length)
            made[slides, default: [:]][turns] = mixer
            return mixer
        }
    }

    private func attention(slides: Bool, turns: Bool, length: Int) throws -> JSONValue {
        let heads = try count("num_attention_heads")
        let headDim = self["head_dim"].isTruthy ? try count("head_dim") : try count("hidden_size") / heads
        let keys = self["num_key_value_heads"].isTruthy ? try count("num_key_value_heads") : heads
        guard headDim > 0, heads * headDim <= Self.mostCount else { throw unusable("num_attention_heads") }
        let rope =
            turns
            ? try RoPEScaling.frequencies(self, headDim: headDim, isLocal: slides, length: length)
            : (frequencies: [], scale: 1)
        guard rope.frequencies.allSatisfy({ $0.isFinite && $0 >= 0 }), rope.scale.isFinite else {
            throw unusable("rope_scaling")
        }
        let squared = try optional("query_pre_attn_scalar") ?? Double(headDim)
        let scale = try optional("attention_multiplier") ?? pow(squared, -0.5)
        let window = slides && self["sliding_window"].isTruthy ? try count("sliding_window") : nil
        let cap = self["attn_logit_softcapping"]
        return .object([
            "type": .string("attention"),
            "modules": family.attention,
            "num_attention_heads": .integer(heads),
            "num_key_value_heads": .integer(keys),
            "head_dim": .integer(headDim),
            "qk_norm": .bool(family.qkNorm),
            "output_gate": .bool(false),
            "attention_scale": .number(scale),
            "attn_logit_softcapping": cap == .null ? .null : .number(try positive("attn_logit_softcapping")),
            "frequencies": .array(rope.frequencies.map(JSONValue.number)),
            "rope_scale": .number(rope.scale),
            "sliding_window": window.map(JSONValue.integer) ?? .null,
            "v_norm": .bool(false),
            "keys_of": .null,
        ])
    }

    /// The maximum sequence length, in tokens, for which `architecture` is valid; nil if there is no limit.
    ///
    /// Ministral 3 multiplies the query at position t by 1 + β log(1 + ⌊t / L⌋) with L = `original_max_position_embeddings`. This factor is 1 for t <
    /// L. LongRoPE has other factors for sequences that are longer than L.
    var longest: Int? {
        let scaling = self["rope_scaling"].object ?? [:]
        let isLimited = scaling["llama_4_scaling_beta"]?.isTruthy == true || RoPEScaling.type(of: scaling) == "longrope"
        return isLimited ? scaling["original_max_position_embeddings"]?.double.map { Int(whole: min($0, 1e6)) } : nil
    }
}
