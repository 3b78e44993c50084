import Foundation
import MeSPFiles

/// The figures in the paper "MeSP" (2026) for MeSP on an iPhone 17 Pro with 4-bit weights.
struct PaperFigures: Decodable {
    let rank: Int
    let timeOfMebp: Double
    /// The peak memory in MB, by model and sequence length.
    private let peakMb: [String: [String: Double]]

    func peak(model: String, seqLen: Int) -> Int? {
        peakMb[model]?["\(seqLen)"].map { Int(whole: $0 * 1e6) }
    }

    func has(model: String) -> Bool { peakMb[model] != nil }

    static let figures: PaperFigures? = {
        return Bundle.module.url(forResource: "paper", withExtension: "json")
            .flatMap { try? Data(contentsOf: $0) }.flatMap {
                try? JSONDecoder.snakeCase.decode(PaperFigures.self, from: $0)
            }
    }()
}
