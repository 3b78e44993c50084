import Foundation
import MLX

/// The 8-bit quantization of AdamW's moments, as in bitsandbytes. Each group of 256 numbers has a scale, its largest absolute value. A code stands
/// for the nearest of 256 fractions of the scale.
///
/// A vector `[P]` becomes uint8 `[⌈P / 256⌉, 260]`. A row contains the float32 scale in four bytes, and the codes of 256 numbers.
struct DynamicQuantization {
    private static let (rowCount, scaleBytes) = (256, 4)

    /// The fraction of each code, ascending, float32 `[256]`.
    private let fractions: MLXArray
    /// The midpoints between neighbouring fractions, and ∞, float32 `[256]`.
    private let middles: MLXArray
    /// A lookup table: the code of the lowest float32 with each pattern of the upper 16 bits, uint8 `[2¹⁶]`.
    private let lowest: MLXArray

    init(signed: Bool) {
        // The fractions are 0, 1, and for each power of ten p from 10⁻⁶ to 1 the midpoints of equal parts of [0.1 p, p]; if they are signed, also the
        // negative midpoints. Each power has twice as many parts as the power before it.
        var numbers = [0.0, 1.0]
        for power in 0...6 {
            let parts = (signed ? 1 : 2) << power
            for part in 0..<parts {
                let number = pow(10, Double(power - 6)) * (0.1 + 0.9 * (Double(part) + 0.5) / Double(parts))
                numbers += signed ? [number, -number] : [number]
            }
        }
        let fractions = numbers.sorted().map(Float.init)
        let middles = zip(fractions, fractions.dropFirst()).map { ($0 + $1) / 2 }
        func code(_ number: Float) -> UInt8 {
            var (low, high) = (0, middles.count)
            while low < high {
                let middle = (low + high) / 2
                if middles[middle] < number { low = middle + 1 } else { high = middle }
            }
            return UInt8(low)
        }
        let lowest = (UInt32(0)..<1 << 16).map { upper in
            // The lowest of the negative numbers with a pattern has the largest magnitude.
            code(Float(bitPattern: upper << 16 | (upper >> 15 == 1 ? 0xFFFF : 0)))
        }
        (self.fractions, self.middles) = (.of(fractions), .of(middles + [.infinity]))
        self.lowest = .of(lowest)
    }

    /// Returns the shape of a quantized vector `[count]`. Bytes of 0 represent a vector of zeros.
    static func shape(_ count: Int) -> [Int] { [(count + rowCount - 1) / rowCount, scaleBytes + rowCount] }

    func quantized(_ x: MLXArray) -> MLXArray {
        let missing = Self.shape(x.size)[0] * Self.rowCount - x.size
        let padded = missing > 0 ? concatenated([x, MLXArray.zeros([missing])]) : x
        let rows = padded.reshaped([-1, Self.rowCount])
        let scale = abs(rows).max(axis: 1, keepDims: true)
        let fraction = rows / which(scale .> 0, scale, 1)
        // The tables have a number for each value of their indices' types, as an error of a GPU can leave any value.
        let lowest = take(lowest, (fraction.view(dtype: .uint32) >> 16).asType(.uint16))
        let codes = lowest + (fraction .> take(middles, lowest)).asType(.uint8)
        return concatenated([scale.view(dtype: .uint8), codes], axis: 1)
    }

    func dequantized(_ rows: MLXArray, count: Int) -> MLXArray {
        let scale = rows[0..., ..<Self.scaleBytes].view(dtype: .float32)
        return (take(fractions, rows[0..., Self.scaleBytes...]) * scale).reshaped([-1])[..<count]
    }
}
