import Foundation
import MeSPFiles

/// The figures of the paper "MeSP" (2026) for MeSP on an iPhone 17 Pro with 4-bit weights. The figures are in `paper.json`, which the benchmarks in
/// `tools/` also read.
struct PaperFigures: Decodable {
    let rank: Int
    /// The time of a step of MeSP, divided by the time of a step of MeBP.
    let timeOfMebp: Double
    /// The peaks in MB, by model and sequence length.
    private let peakMb: [String: [String: Double]]

    /// Returns the peak in bytes; nil if the paper gives none for this model and length.
    func peak(model: String, seqLen: Int) -> Int? {
        peakMb[model]?["\(seqLen)"].map { Int($0 * 1e6) }
    }

    func has(model: String) -> Bool { peakMb[model] != nil }

    /// The figures; nil if the resource is missing.
    static let figures: PaperFigures? = {
        return Bundle.module.url(forResource: "paper", withExtension: "json")
            .flatMap { try? Data(contentsOf: $0) }.flatMap {
                try? JSONDecoder.snakeCase.decode(PaperFigures.self, from: $0)
            }
    }()
}
