import Foundation
import MLX
import MeSPBundle
import MeSPSentences

/// A folder of adapters, as mlx-lm or PEFT writes it, and the factor of what they add to a layer's output.
///
/// A model takes several at once, of any ranks: y = x Wᵀ + Σ wᵢ sᵢ (x Aᵢ) Bᵢ + b, with the weight w and the scale s of each.
package struct WeightedAdapters: Sendable, Equatable {
    package let folder: URL
    /// From 0 to 10. Adapters of weight 0 are left out.
    package let weight: Float

    package init(_ folder: URL, weight: Float = 1) { (self.folder, self.weight) = (folder, weight) }
}

/// Reads several folders of adapters as one set.
///
/// - Returns: nil where no adapters are left. Of one folder the matrices are those in its files, and the weight is a factor of the scale. Of
///   several they are joined, as long as all their ranks together, and the scale is 1.
/// - Throws: `MeSPError` that names a folder which does not fit the model, or a weight out of range.
package func loadAdapters(_ adapters: [WeightedAdapters], architecture: Architecture) throws -> LoadedAdapters? {
    for each in adapters where !(0...10).contains(each.weight) {
        throw MeSPError(
            "The weight of the adapters in \(each.folder.path) is \(each.weight); it must be from 0 to 10.")
    }
    let used = adapters.filter { $0.weight != 0 }
    guard used.count > 1 else {
        return try used.first.map { only in
            let its = try loadAdapters(from: only.folder, architecture: architecture)
            return LoadedAdapters(rank: its.rank, scale: its.scale * only.weight, lora: its.lora, layouts: its.layouts)
        }
    }
    var readers = try used.map { try AdapterReader($0.folder, of: architecture) }
    let rank = readers.reduce(0) { $0 + $1.rank }
    let layouts = architecture.layouts(rank: rank, withExperts: readers.contains(where: \.hasExperts))
    // Block by block, so that memory holds little more than the result.
    let lora = try layouts.enumerated().map { block, layout in
        let parts = try readers.indices.map { try readers[$0].read(block) }
        let matrices = layout.modules.map { module in
            let each = readers.indices.map { i in
                readers[i].matrices(module, block, in: parts[i], timesB: readers[i].scale * used[i].weight)
            }
            return LoRAMatrices(a: concatenated(each.map(\.a), axis: -1), b: concatenated(each.map(\.b), axis: -2))
        }
        let flat = layout.packed(matrices)
        eval(flat)
        Memory.clearCache()
        return flat
    }
    for reader in readers { try reader.checkEnd() }
    return LoadedAdapters(rank: rank, scale: 1, lora: lora, layouts: layouts)
}

extension AdapterReader {
    fileprivate var hasExperts: Bool { layouts.contains { $0.modules.contains(where: \.isStacked) } }

    /// A and B of a module, B times a factor; zeros where the folder has no adapters of experts.
    fileprivate func matrices(
        _ module: Module, _ block: Int, in flat: MLXArray, timesB factor: Float
    ) -> LoRAMatrices {
        let layout = layouts[block]
        guard layout.modules.contains(module) else {
            let (a, b) = layout.block.shapes([module], rank: rank)
            return LoRAMatrices(a: MLXArray.zeros(a), b: MLXArray.zeros(b))
        }
        let matrices = layout.matrices(module, in: flat)
        return LoRAMatrices(a: matrices.a, b: matrices.b * factor)
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
