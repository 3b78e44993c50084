import MLX

func eachRecord(_ records: [Range<Int>], backward: (_ rows: Range<Int>) -> [MLXArray]) -> [MLXArray] {
    let parts = records.map(backward)
    return parts[0].indices.map { index in concatenated(parts.map { $0[index] }) }
}
