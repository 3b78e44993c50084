import MLX
import MeSPAdapters
import MeSPBundle

extension BlockWeights {
    /// Returns ‖w‖² `[layout.magnitudes]` of each row w of the weight matrices of the modules with magnitudes, evaluated.
    ///
    /// - Parameter bytes: the maximum size in bytes of the rows that are dequantized at a time.
    func squaredNorms(_ layout: LoRALayout, bytes: Int = 1 << 20) -> MLXArray {
        let parts = layout.modules.filter { !$0.isStacked }.flatMap { module in
            let w = matrix(module)
            return tiles(of: w.rows, size: max(1, bytes / 4 / shape.dimensions(module).inputs)).map { rows in
                let squares = w.rows(rows).inFloat32.square().sum(axis: -1)
                eval(squares)
                return squares
            }
        }
        let all = concatenated(parts)
        eval(all)
        return all
    }
}

extension ModelBundle {
    /// Reads the parameters of a block with DoRA and returns A, B̃ and G `[P]`, evaluated; see `DoRAReading`.
    func readScaled(
        _ block: Int, _ layout: LoRALayout, scale: Float, _ read: (_ base: MLXArray) throws -> MLXArray
    ) throws -> MLXArray {
        try withBlock(block) { weights in
            let squares = weights.squaredNorms(layout)
            let schedule = schedule(length: 1, bytes: 1 << 20)
            let lora = try read(layout.base(sqrt(squares)))
            let norms = schedule.norms(weights, lora, layout, scale: scale, squares: squares)
            let scaled = DoRA(lora, layout, norms: norms).scaled
            eval(scaled)
            return scaled
        }
    }
}

extension Schedule {
    /// Returns n of all modules with magnitudes; see `DoRA`.
    ///
    /// - Parameter squares: the squared norms of the rows of W of all modules, from `BlockWeights.squaredNorms`
    func norms(
        _ weights: BlockWeights, _ lora: MLXArray, _ layout: LoRALayout, scale: Float, squares: MLXArray
    ) -> MLXArray {
        concatenated(
            layout.modules.compactMap { module in
                guard let squares = layout.magnitudes(module, in: squares) else { return nil }
                let (w, scaled) = (weights.matrix(module), DoRA.Scaled(layout.matrices(module, in: lora), scale: scale))
                let wA = concatenated(
                    each(of: w.rows, size: projectionRows) { w.rows($0).apply(scaled.a.T, as: .float32) }, axis: 1)
                return scaled.norms(squares: squares, wA: wA)
            })
    }
}
