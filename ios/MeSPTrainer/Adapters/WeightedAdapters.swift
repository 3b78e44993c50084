import Foundation
import MLX
import MeSPBundle
import MeSPSentences

/// A folder of adapters in the format of mlx-lm or PEFT, with a weight.
///
/// A model can have several adapters of any ranks. With LoRA, a layer computes
///
///     y = x Wᵀ + Σ wᵢ sᵢ (x Aᵢ) Bᵢ + b
///
/// where adapter i has the weight wᵢ and the scale sᵢ. A DoRA adapter alone, with weight 1, computes g ∘ (x Wᵀ + s (x A) B) + b, where g is m divided
/// by the norms of the rows of W + s (A B)ᵀ. In the sum over several adapters, a DoRA adapter has Bᵢ ∘ gᵢ in place of Bᵢ, and adds the term wᵢ (gᵢ −
/// 1) ∘ (x Wᵀ).
package struct WeightedAdapters: Sendable, Equatable {
    package let folder: URL
    /// The weight, from 0 to 10. Adapters with weight 0 are left out.
    package let weight: Float

    package init(_ folder: URL, weight: Float = 1) { (self.folder, self.weight) = (folder, weight) }
}

/// A function that reads a block's DoRA adapters and returns the vector with which the block is computed (`DoRA.scaled`).
///
/// - Parameters:
///   - scale: the scale of the adapters.
///   - read: reads A, B and m as a vector `[P]`. Its argument supplies the matrices that the folder lacks.
package typealias DoRAReading = (
    _ block: Int, LoRALayout, _ scale: Float, _ read: (_ base: MLXArray) throws -> MLXArray
) throws -> MLXArray

/// Reads several folders of adapters as one set.
///
/// - Returns: the adapters, or nil if no weight is above 0. With one folder, the scale includes the weight. With several folders, the rank is the sum
///   of their ranks, B includes weight and scale, and the scale is 1. With DoRA, m holds the factor by which x Wᵀ is multiplied.
/// - Throws: `MeSPError` if a folder cannot be read or does not fit the model, or if a weight is out of range.
package func loadAdapters(
    _ adapters: [WeightedAdapters], architecture: Architecture, dora: DoRAReading
) throws -> LoadedAdapters? {
    for each in adapters where !(0...10).contains(each.weight) {
        throw MeSPError(
            "The weight of the adapters in \(each.folder.path) is \(each.weight); it must be from 0 to 10.")
    }
    let used = adapters.filter { $0.weight != 0 }
    guard !used.isEmpty else { return nil }
    var readers = try used.map { try AdapterReader($0.folder, of: architecture) }
    let isOne = used.count == 1
    let rank = readers.reduce(0) { $0 + $1.rank }
    let layouts =
        isOne
        ? readers[0].layouts
        : architecture.layouts(
            rank: rank, withExperts: readers.contains(where: \.hasExperts),
            hasMagnitudes: readers.contains(where: \.hasMagnitudes))
    // Reading one block at a time limits the peak memory.
    let lora = try layouts.enumerated().map { block, layout in
        let parts = try readers.indices.map { index in
            WeightedVector(
                layout: readers[index].layouts[block], vector: try readers[index].read(block, dora),
                weight: used[index].weight, factorOfB: isOne ? 1 : readers[index].scale * used[index].weight)
        }
        if isOne, !layout.hasMagnitudes { return parts[0].vector }
        let flat = layout.joined(parts)
        eval(flat)
        Memory.clearCache()
        return flat
    }
    for reader in readers { try reader.checkEnd() }
    return LoadedAdapters(
        rank: rank, scale: isOne ? readers[0].scale * used[0].weight : 1, lora: lora, layouts: layouts)
}

extension AdapterReader {
    fileprivate var hasExperts: Bool { layouts.contains { $0.modules.contains(where: \.isStacked) } }
    fileprivate var hasMagnitudes: Bool { layouts.contains(where: \.hasMagnitudes) }

    fileprivate mutating func read(_ block: Int, _ dora: DoRAReading) throws -> MLXArray {
        guard layouts[block].hasMagnitudes else { return try read(block) }
        return try dora(block, layouts[block], scale) { base in try read(block, absent: base) }
    }
}

struct WeightedVector {
    let layout: LoRALayout
    /// The LoRA parameters `[P]`, with the factors g in place of m.
    let vector: MLXArray
    let weight: Float
    /// The factor of B. It is weight · scale, or 1 for a single folder, whose weight is part of `LoadedAdapters.scale`.
    let factorOfB: Float

    /// Returns A, `factorOfB` · B and, with DoRA, weight · (g − 1) as m. A module without matrices gets zeros.
    fileprivate func matrices(_ module: Module) -> LoRAMatrices {
        guard layout.modules.contains(module) else {
            let (a, b) = layout.block.shapes([module], rank: layout.rank)
            return LoRAMatrices(a: MLXArray.zeros(a), b: MLXArray.zeros(b))
        }
        let matrices = layout.matrices(module, in: vector)
        return LoRAMatrices(a: matrices.a, b: matrices.b * factorOfB, m: matrices.m.map { weight * ($0 - 1) })
    }
}

extension LoRALayout {
    /// Joins the A and the B of all `parts` along their rank axis, and adds the m to 1. The rank of the result is the sum of the parts' ranks.
    func joined(_ parts: [WeightedVector]) -> MLXArray {
        packed(
            modules.map { module in
                let each = parts.map { $0.matrices(module) }
                let m = each.compactMap(\.m)
                return LoRAMatrices(
                    a: concatenated(each.map(\.a), axis: -1), b: concatenated(each.map(\.b), axis: -2),
                    m: m.isEmpty ? nil : m.reduce(MLXArray(Float(1))) { $0 + $1 })
            })
    }
}

/// The chosen adapters and the modification dates of their files. Adapters with weight 0 are left out.
package struct AdapterSelection: Sendable, Equatable {
    private struct Part: Sendable, Equatable {
        let adapters: WeightedAdapters
        let written: [Date?]
    }

    private let parts: [Part]

    package init(_ adapters: [WeightedAdapters]) {
        let names = [AdapterFormat.configFile, AdapterFormat.mlx.file, AdapterFormat.peft.file]
        parts = adapters.filter { $0.weight != 0 }.map { each in
            let paths = names.map { each.folder.appendingPathComponent($0).path }
            return Part(
                adapters: each,
                written: paths.map {
                    (try? FileManager.default.attributesOfItem(atPath: $0))?[.modificationDate] as? Date
                })
        }
    }
}
