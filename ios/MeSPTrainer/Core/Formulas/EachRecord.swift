import MLX

/// The gradients `[T, features]` that `backward` gives of each record's rows, one record below the other.
func eachRecord(_ records: [Range<Int>], backward: (_ rows: Range<Int>) -> [MLXArray]) -> [MLXArray] {
    let parts = records.map(backward)
    return parts[0].indices.map { index in concatenated(parts.map { $0[index] }) }
}
