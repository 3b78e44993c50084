import Foundation
import MeSPFiles
import MeSPSentences

enum RoPEScaling {
    /// The keys that may also be beside `rope_parameters`.
    static let keys = ["rope_theta", "partial_rotary_factor"]

    /// Returns the type of a `rope_scaling`; `default` if it names none.
    static func type(of scaling: [String: JSONValue]) -> String {
        let named = ["rope_type", "type"].lazy.compactMap { scaling[$0] }.first(where: \.isTruthy)
        let type = named.map { $0.string ?? $0.json } ?? "default"
        return type == "su" ? "longrope" : type  // an older name
    }

    static func check(_ scaling: [String: JSONValue], _ key: String) throws {
        let type = type(of: scaling)
        guard type != "common", let its = PlainFamilies.rope[type], let common = PlainFamilies.rope["common"] else {
            throw unsupported(key, .object(scaling))
        }
        for (name, value) in scaling.sorted(by: { $0.key < $1.key })
        where value != .null && !its.contains(name) && !common.contains(name) {
            throw unsupported("\(name) of \(key) (of the type '\(type)')", value)
        }
    }

    /// Returns the complete RoPE of a layer type, with values of `beside` for missing ones.
    ///
    /// A default RoPE rotates whole heads in most classes, whatever `partial_rotary_factor` is.
    ///
    /// - Parameter hasOriginal: whether `original_max_position_embeddings` outside of the object is read.
    static func complete(
        _ given: [String: JSONValue], _ beside: [String: JSONValue], _ config: ConfigJSON, _ source: String,
        hasOriginal: Bool
    ) throws -> [String: JSONValue] {
        try check(given, source)
        let type = type(of: given)
        var scaling = beside.merging(given) { $1 }
        for key in ["type", "rope_type"] { scaling[key] = .string(type) }
        if !config.family.takes.contains("partial_rotary_factor"), type != "proportional" {
            let share = scaling["partial_rotary_factor"] ?? .null
            guard ["default", "mrope"].contains(type) || share == .null || share.double == 1 else {
                throw unsupported("partial_rotary_factor", share)
            }
            scaling["partial_rotary_factor"] = nil
        }
        guard ["llama3", "longrope", "yarn"].contains(type) else { return scaling }
        let key = "original_max_position_embeddings"
        let outer = hasOriginal ? config[key] : .null
        let said = [outer, scaling[key] ?? .null].first(where: \.isTruthy)
        scaling[key] = try said ?? config.value("max_position_embeddings")
        let original = try config.positive(key, of: scaling)
        if type != "llama3", (scaling["factor"] ?? .null) == .null {
            scaling["factor"] = .number(try config.positive("max_position_embeddings") / original)
        }
        guard type != "llama3" else { return scaling }
        for key in ["low_freq_factor", "high_freq_factor", "attention_factor"] where (scaling[key] ?? .null) != .null {
            _ = try config.positive(key, of: scaling)
        }
        for key in ["beta_fast", "beta_slow"] where scaling[key]?.isTruthy == true {
            _ = try config.positive(key, of: scaling)
        }
        let factor = try config.positive("factor", of: scaling)
        if type == "yarn" {
            let magnitude = try attentionFactor(scaling, factor, config)
            scaling["attention_factor"] = .number(magnitude)
            // mlx-lm ignores `attention_factor` and multiplies q and k by 0.1 · mscale · ln(factor) + 1. For a factor above 1, this `mscale` makes
            // the result `attention_factor`.
            scaling["mscale"] = .number((magnitude - 1) / (factor > 1 ? 0.1 * log(factor) : .infinity))
            scaling["mscale_all_dim"] = .integer(0)
        } else if (scaling["attention_factor"] ?? .null) == .null {
            scaling["attention_factor"] = .number((1 + (factor > 1 ? log(factor) / log(original) : 0)).squareRoot())
        }
        return scaling
    }

    /// Returns YaRN's factor for q and k: `attention_factor` if it is given. Otherwise the factor is computed from `factor`, and from `mscale` and
    /// `mscale_all_dim` if both are given.
    private static func attentionFactor(
        _ scaling: [String: JSONValue], _ factor: Double, _ config: ConfigJSON
    ) throws -> Double {
        if let given = scaling["attention_factor"]?.double { return given }
        func magnitude(_ weight: Double) -> Double { factor <= 1 ? 1 : 0.1 * weight * log(factor) + 1 }
        let keys = ["mscale", "mscale_all_dim"]
        guard keys.allSatisfy({ scaling[$0]?.isTruthy == true }) else { return magnitude(1) }
        let weights = try keys.map { try config.positive($0, of: scaling) }
        return magnitude(weights[0]) / magnitude(weights[1])
    }

    /// Returns the frequencies of the rotated pairs, in radians per position, and the factor for the pairs.
    ///
    /// The frequencies are θ^(−2i/D) for i < D/2, changed by `rope_parameters`. D is headDim · partial_rotary_factor, or headDim for the type
    /// `proportional`. If `isLocal` is set, some models have other `rope_parameters`.
    ///
    /// - Parameter length: the maximum sequence length, in tokens. LongRoPE has other factors for long sequences.
    static func frequencies(
        _ config: ConfigJSON, headDim: Int, isLocal: Bool, length: Int
    ) throws -> (frequencies: [Double], scale: Double) {
        let rope = config["rope_parameters"].object ?? [:]
        let scaling = rope[isLocal ? "sliding_attention" : "full_attention"]?.object ?? rope
        let theta = try config.positive("rope_theta", of: scaling)
        let type = type(of: scaling)
        let isPartial = scaling["partial_rotary_factor"]?.isTruthy == true
        let share = isPartial ? try config.positive("partial_rotary_factor", of: scaling) : 1
        guard share <= 1 else { throw unusable("partial_rotary_factor") }
        let turned = type == "proportional" ? Double(headDim) : Double(headDim) * share
        guard turned <= 4096 else { throw unusable("head_dim") }
        let rotated = Int(whole: turned)
        let base = stride(from: 0, to: rotated, by: 2).map { pow(theta, -Double($0) / Double(rotated)) }
        func number(_ key: String) throws -> Double { try config.positive(key, of: scaling) }

        switch type {
        case "linear":
            let factor = try number("factor")
            return (base.map { $0 / factor }, 1)
        case "proportional":
            // Only the first pairs are rotated.
            let factor = scaling["factor"] == nil ? 1 : try number("factor")
            let turning = Int(whole: share * Double(base.count))
            return (base.enumerated().map { $0 < turning ? $1 / factor : 0 }, 1)
        case "llama3":
            // Low frequencies are divided by `factor`. High frequencies stay unchanged. Frequencies in between are interpolated.
            let (low, high) = (try number("low_freq_factor"), try number("high_freq_factor"))
            guard low != high else { throw unusable("rope_scaling") }
            let (length, factor) = (try number("original_max_position_embeddings"), try number("factor"))
            let frequencies = base.map { frequency in
                let turns = length * frequency / (2 * .pi)
                let kept = min(max((turns - low) / (high - low), 0), 1)
                return frequency * (kept + (1 - kept) / factor)
            }
            return (frequencies, 1)
        case "longrope":
            let isLong = Double(length) > (try number("original_max_position_embeddings"))
            let key = isLong ? "long_factor" : "short_factor"
            let factors = try config.value(key, of: scaling).array?.compactMap(\.double) ?? []
            guard factors.count == base.count else { throw unusable("rope_scaling") }
            return (zip(base, factors).map(/), try number("attention_factor"))
        case "yarn":
            return (try yarn(base, theta, scaling, config), try number("attention_factor"))
        default: return (base, 1)
        }
    }

    /// Returns YaRN's frequencies. High frequencies stay unchanged, low ones are divided by the factor, and those in between are interpolated.
    private static func yarn(
        _ base: [Double], _ theta: Double, _ scaling: [String: JSONValue], _ config: ConfigJSON
    ) throws -> [Double] {
        let (factor, size) = (try config.positive("factor", of: scaling), Double(2 * base.count))
        let length = try config.positive("original_max_position_embeddings", of: scaling)
        func bound(_ key: String, _ usual: Double) throws -> Double {
            // The index of the pair that makes `turns` full rotations within the original context length.
            let turns = scaling[key]?.isTruthy == true ? try config.positive(key, of: scaling) : usual
            return size * log(length / (turns * 2 * .pi)) / (2 * log(theta))
        }
        var (low, high) = (try bound("beta_fast", 32), try bound("beta_slow", 1))
        if scaling["truncate"]?.isTruthy ?? true { (low, high) = (low.rounded(.down), high.rounded(.up)) }
        (low, high) = (max(low, 0), min(high, size - 1))
        let width = high - low == 0 ? 0.001 : high - low
        return base.enumerated().map { index, frequency in
            let ramp = min(max((Double(index) - low) / width, 0), 1)
            return frequency * (1 - ramp + ramp / factor)
        }
    }
}
