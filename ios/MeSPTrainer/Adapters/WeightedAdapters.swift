import Foundation
import MLX
import MeSPBundle
import MeSPSentences

/// A folder of adapters, as mlx-lm or PEFT writes it, and the factor of what they add to a layer's output.
///
/// A model takes several at once, of any ranks: y = x Wᵀ + Σ wᵢ sᵢ (x Aᵢ) Bᵢ + b, with the weight w and the scale s of each. Of DoRA's, which are
/// g ∘ (x Wᵀ + s (x A) B), it takes w (g − 1) ∘ (x Wᵀ) too, and B ∘ g in place of B.
package struct WeightedAdapters: Sendable, Equatable {
    package let folder: URL
    /// From 0 to 10. Adapters of weight 0 are left out.
    package let weight: Float

    package init(_ folder: URL, weight: Float = 1) { (self.folder, self.weight) = (folder, weight) }
}

/// Makes what a block is computed with, `DoRA.scaled`, of adapters with magnitudes, which depends on the model's weights.
///
/// - Parameters:
///   - scale: of the adapters.
///   - read: reads A, B and m `[P]`; gets those with which the block is the base model's.
package typealias DoRAReading = (
    _ block: Int, LoRALayout, _ scale: Float, _ read: (_ base: MLXArray) throws -> MLXArray
) throws -> MLXArray

/// Reads several folders of adapters as one set.
///
/// - Returns: nil where no adapters are left. Of one folder the matrices are those in its files, and the weight is a factor of the scale. Of
///   several they are joined, as long as all their ranks together, and the scale is 1. Where some are DoRA's, m is the factor of x Wᵀ.
/// - Throws: `MeSPError` that names a folder which does not fit the model, or a weight out of range.
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
    // Block by block, so that memory holds little more than the result.
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

    /// What a block is computed with.
    fileprivate mutating func read(_ block: Int, _ dora: DoRAReading) throws -> MLXArray {
        guard layouts[block].hasMagnitudes else { return try read(block) }
        return try dora(block, layouts[block], scale) { base in try read(block, absent: base) }
    }
}

/// Adapters of a block that are to be joined with others.
struct WeightedVector {
    let layout: LoRALayout
    /// What the block is computed with.
    let vector: MLXArray
    let weight: Float
    /// The factor of B, which has the weight in it unless the scale has.
    let factorOfB: Float

    /// A and B of a module, B times the factor; zeros where the layout has none of experts. And w (G − 1) of DoRA's.
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
    /// The vector of several adapters' ranks together.
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

/// The adapters that a model has, in their files: where two are equal, so is what the model computes.
package struct AdapterSelection: Sendable, Equatable {
    private struct Part: Sendable, Equatable {
        let adapters: WeightedAdapters
        /// When each of the files was written; nil for one that is not there.
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
