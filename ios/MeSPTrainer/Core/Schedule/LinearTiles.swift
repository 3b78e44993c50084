import MLX

/// A linear layer, for some outputs at a time, and with dropout for some tokens at a time.
extension Tiled where Formula == LoRALinear {
    func callAsFunction(_ x: MLXArray) -> MLXArray {
        guard schedule.projectionRows < formula.weight.rows else { return formula(x) }
        let h = formula.h(x)
        return concatenated(
            schedule.each(of: formula.weight.rows, size: schedule.projectionRows) { formula.outputs($0)(x, h: h) },
            axis: -1)
    }

    /// Returns dx, added to the sum if there is one, and the gradients of A, B and G.
    func backward(
        _ x: MLXArray, dy: MLXArray, wanted: LoRALinear.Wanted, wantsDx: Bool, addedTo sum: MLXArray?
    ) -> LoRALinear.Gradients {
        let dyBT = formula.dyBT(dy)
        var d = LoRALinear.Gradients()
        if wanted != .none {
            let (xA, dA) = products(x, wanted == .all ? dyBT : nil)
            (d.dA, d.dB) = (dA, formula.dB(xA, dy: dy))
        }
        let hasG = formula.lora?.m != nil && wanted != .none
        guard wantsDx || hasG else { return schedule.part(d) }
        if wantsDx {
            d.dx = adapterDx(dyBT, addedTo: sum)
            if let dx = d.dx, formula.lora != nil { d.dx = schedule.inputs([dx], after: d.arrays)[0] }
        }
        var dG = [MLXArray]()
        for rows in tiles(of: formula.weight.rows, size: schedule.projectionRows) {
            let (some, dy) = (formula.outputs(rows), dy[0..., rows])
            if hasG { dG += tiled(some).dG(x, dy: dy).arrays }
            if wantsDx { d.dx = schedule.part(some.weightDx(dy, addedTo: d.dx)) }
        }
        if hasG { d.dG = concatenated(dG) }
        return d
    }

    func dG(_ x: MLXArray, dy: MLXArray) -> MLXArray? {
        guard formula.lora?.m != nil else { return nil }
        return concatenated(
            tiles(of: formula.weight.rows, size: schedule.columnsAtOnce(of: dy)).flatMap {
                schedule.part(formula.outputs($0).dG(x, dy: dy[0..., $0]).arrays)
            })
    }

    func products(_ x: MLXArray, _ g: MLXArray?) -> (xA: MLXArray?, xTg: MLXArray?) {
        guard formula.hasDropout else { return formula.products(x, g) }
        var (xA, xTg) = ([MLXArray](), MLXArray?.none)
        for rows in tiles(of: x.dim(0), size: schedule.rowsAtOnce(of: x)) {
            let terms = formula.rows(rows).products(x[rows], g?[rows], addedTo: (nil, xTg))
            schedule.part(terms.xA, terms.xTg)
            (xA, xTg) = (xA + terms.xA.arrays, terms.xTg)
        }
        return (xA.isEmpty ? nil : concatenated(xA), xTg)
    }

    func adapterDx(_ dyBT: MLXArray?, addedTo sum: MLXArray?) -> MLXArray? {
        guard formula.hasDropout, let dyBT, let a = formula.lora?.a else {
            return formula.adapterDx(dyBT, addedTo: sum)
        }
        var dx = sum ?? MLXArray.zeros([dyBT.dim(0), a.dim(0)])
        for rows in tiles(of: dx.dim(0), size: schedule.rowsAtOnce(of: dx)) {
            let term = formula.rows(rows).adapterDx(dyBT[rows], addedTo: dx[rows])
            if let term { replace(rows, of: &dx, by: term) }
        }
        return dx
    }
}
