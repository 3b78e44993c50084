import Foundation
import MeSPFiles

/// The figures that the paper ("MeSP", 2026) reports for MeSP on an iPhone 17 Pro with 4-bit weights: `paper.json`, which the benchmarks in
/// `tools/` read too.
struct PaperFigures: Decodable {
    let rank: Int
    /// Time of a step as a multiple of MeBP's.
    let timeOfMebp: Double
    /// By model and tokens of a sequence.
    private let peakMb: [String: [String: Double]]

    /// The peak in bytes; nil where the paper has none.
    func peak(model: String, seqLen: Int) -> Int? {
        peakMb[model]?["\(seqLen)"].map { Int($0 * 1e6) }
    }

    func has(model: String) -> Bool { peakMb[model] != nil }

    /// nil where the resource is missing.
    static let figures: PaperFigures? = {
        return Bundle.module.url(forResource: "paper", withExtension: "json")
            .flatMap { try? Data(contentsOf: $0) }.flatMap {
                try? JSONDecoder.snakeCase.decode(PaperFigures.self, from: $0)
            }
    }()
}
