import MLX

/// The gradients `[T, features]` that `backward` gives of each record's rows, one record below the other. Those of several records are
/// evaluated.
func eachRecord(_ records: [Range<Int>], backward: (_ rows: Range<Int>) -> [MLXArray]) -> [MLXArray] {
    let parts = records.map(backward)
    guard parts.count > 1 else { return parts[0] }
    let wholes = parts[0].indices.map { index in concatenated(parts.map { $0[index] }) }
    eval(wholes)
    return wholes
}
