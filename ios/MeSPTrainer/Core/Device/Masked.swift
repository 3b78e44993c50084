import MLX

/// Returns x[t, j] where r[t] c[j] mod 2³² ≥ `least`, and 0 elsewhere.
func masked(_ x: MLXArray, rows r: [UInt32], columns c: [UInt32], least: UInt32) -> MLXArray {
    guard Device.isCPU else { return fusedMask([x, .of(r, [r.count, 1]), .of(c), MLXArray(least)]) }
    // On a CPU MLX does not fuse operations on integers, and would write an array of the products.
    let kept = [Bool](unsafeUninitializedCapacity: r.count * c.count) { kept, count in
        for (row, r) in r.enumerated() {
            for column in c.indices { kept[row * c.count + column] = r &* c[column] >= least }
        }
        count = r.count * c.count
    }
    return which(MLXArray.of(kept, [r.count, c.count]), x, Float(0))
}

private let fusedMask = Fused { which($0[1] * $0[2] .>= $0[3], $0[0], Float(0)) }
