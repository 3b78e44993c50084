import MLX
import MeSPAdapters
import MeSPBundle

/// A gated MLP or an expert: y = w down(H), H = act(gate(x)) ∘ up(x), where w is a factor for each token, or 1.
struct GatedMLP {
    let gate, up, down: LoRALinear
    let names: (gate: Projection, up: Projection, down: Projection)
    let activation: Activation

    /// Returns sum + down(H) `[n, hidden]` in float32, without w.
    func callAsFunction(_ x: MLXArray, by size: Int? = nil, addedTo sum: MLXArray?, machine: Machine) -> MLXArray {
        let tokens = tiles(of: x.dim(0), size: machine.mlpTileTokens)
        guard tokens.count > 1 else { return byFeatures(x, size, addedTo: sum, machine) }
        var inputs = [x] + sum.arrays
        return concatenated(
            machine.reduce(tokens, [MLXArray](), reading: &inputs) { parts, t, inputs in
                let sum = inputs.count > 1 ? inputs[1][t] : nil
                parts.append(rows(t).byFeatures(inputs[0][t], size, addedTo: sum, machine))
            })
    }

    private func rows(_ range: Range<Int>) -> GatedMLP {
        GatedMLP(
            gate: gate.rows(range), up: up.rows(range), down: down.rows(range), names: names, activation: activation)
    }

    private func byFeatures(
        _ x: MLXArray, _ size: Int?, addedTo sum: consuming MLXArray?, _ machine: Machine
    ) -> MLXArray {
        let features = tiles(of: gate.weight.rows, size: size ?? machine.features)
        var none = [MLXArray]()
        let y = machine.reduce(features, sum, reading: &none) { sum, f, _ in
            let (gate, up) = machine.part(gate.outputs(f)(x), up.outputs(f)(x))
            sum = applyDown(gate, up, f, addedTo: sum)
        }
        return biased(y)
    }

    func inner(_ x: MLXArray) -> (gate: MLXArray, up: MLXArray) { (gate(x), up(x)) }

    func applyDown(_ gate: MLXArray, _ up: MLXArray, addedTo sum: MLXArray?) -> MLXArray {
        biased(applyDown(gate, up, 0..<self.gate.weight.rows, addedTo: sum))
    }

    /// Returns sum + down(H) for the features `f` of H, without the bias.
    private func applyDown(_ gate: MLXArray, _ up: MLXArray, _ f: Range<Int>, addedTo sum: MLXArray?) -> MLXArray {
        let y = down.inputs(f)(activation.gated(gate: gate, up: up))
        return sum.map { $0 + y } ?? y
    }

    private func biased(_ y: MLXArray?) -> MLXArray {
        guard let y else { preconditionFailure("an MLP without features") }
        return down.bias.map { y + $0 } ?? y
    }

    private struct TokenSums: Arrays {
        /// dx without the adapters' terms; (H ∘ K) A with down's A and dropout mask K; d_gate Bᵀ with gate's B, and d_up Bᵀ with up's B; rowsum(Q ∘
        /// H).
        var dx, hDown, dGateBT, dUpBT, dw: MLXArray?

        var arrays: [MLXArray] { [dx, hDown, dGateBT, dUpBT, dw].arrays }
    }

    private struct FeatureSums: Arrays {
        var dADown, dBGate, dBUp, dGGate, dGUp: MLXArray?

        var arrays: [MLXArray] { [dADown, dBGate, dBUp, dGGate, dGUp].arrays }
    }

    private struct Sums: Arrays {
        var tokens: [TokenSums]
        var features: [FeatureSums]
        var dGDown: MLXArray?
        var last = (t: 0, f: 0)

        var arrays: [MLXArray] { tokens[last.t].arrays + features[last.f].arrays + dGDown.arrays }
    }

    /// Returns the gradients:
    ///
    ///     Q = (G ∘ dy) Wd + s (dy Bdᵀ) Adᵀ ∘ M        dw = rowsum(Q ∘ H) + dy · bias of down        dH = w ∘ Q
    ///     d_gate, d_up from dH by the activation        dx = gate's dx from d_gate + up's dx from d_up
    ///
    /// Wd, Ad, Bd, G and M are down's, see `LoRALinear.backward`. The adapters' gradients are computed as there, but as sums over tiles. The gradient
    /// of down's output is w ∘ dy.
    ///
    /// - Parameters:
    ///   - kept: gate and up of x; nil to recompute them
    ///   - tile: the numbers of tokens and features in a tile; the tile has all tokens or all features
    /// - Returns: dx `[n, hidden]` and dw `[n, 1]` in float32, and the gradients of the adapters. dw is nil without w.
    func backward(
        _ x: MLXArray, kept: (gate: MLXArray, up: MLXArray)? = nil, dy: MLXArray, w: MLXArray? = nil,
        wantsA: Bool, tile: (tokens: Int, features: Int), machine: Machine
    ) -> (dx: MLXArray, dw: MLXArray?, gradients: LoRAGradients) {
        let (tokens, features) = (
            tiles(of: x.dim(0), size: tile.tokens), tiles(of: gate.weight.rows, size: tile.features)
        )
        let hasG = [gate, up, down].contains { $0.lora?.m != nil }
        let kept = hasG ? nil : kept
        let (hGate, hUp, dyBT) = {
            let x = x.asType(.float32)
            return (gate.h(x), up.h(x), down.dyBT(dy))
        }()
        var inputs = machine.inputs([x, dy], after: [x] + [hGate, hUp, dyBT].arrays)
        let none = Sums(
            tokens: tokens.map { _ in TokenSums() }, features: features.map { _ in FeatureSums() })
        let places = tokens.indices.flatMap { t in features.indices.map { f in (t, f) } }
        let sums = machine.reduce(places, none, reading: &inputs) { sums, place, inputs in
            sums.last = place
            let (t, f, x, dy) = (tokens[place.0], features[place.1], inputs[0], inputs[1])
            let (gateF, upF, downF) = (gate.outputs(f), up.outputs(f), down.rows(t).inputs(f))
            func terms(_ linear: LoRALinear, _ xW: MLXArray?, _ h: MLXArray?) -> [MLXArray] {
                [xW, product(h?[t], linear.lora?.b), linear.bias].arrays
            }
            let (xGate, xUp) = kept == nil ? (gateF.weight.apply(x[t]), upF.weight.apply(x[t])) : (nil, nil)
            let qW = downF.weight.applyTransposed(dy[t], times: downF.lora?.m, addedTo: nil)
            let q = downF.adapterDx(dyBT?[t], addedTo: qW) ?? qW
            let (act, dGate, dUp) = activation.gatedBackward(
                gate: kept.map { [$0.gate[t, f]] } ?? terms(gateF, xGate, hGate),
                up: kept.map { [$0.up[t, f]] } ?? terms(upF, xUp, hUp),
                factors: (gateF.lora?.m, upF.lora?.m), dAct: w.map { $0[t] * q } ?? q)
            var (own, ofF) = (sums.tokens[place.0], sums.features[place.1])
            if let xGate, let xUp, hasG {
                machine.part(act, dGate, dUp)
                func dG(_ linear: LoRALinear, _ dy: MLXArray, _ xW: MLXArray) -> MLXArray? {
                    linear.lora?.m == nil ? nil : (dy * xW).sum(axis: 0)
                }
                ofF.dGGate = joined(ofF.dGGate, dG(gateF, dGate, xGate))
                ofF.dGUp = joined(ofF.dGUp, dG(upF, dUp, xUp))
                machine.part(ofF.dGGate, ofF.dGUp)
                let dyDown = w.map { $0[t] * dy[t] } ?? dy[t]
                sums.dGDown = joined(sums.dGDown, downF.dG(act, dy: dyDown, machine: machine))
            }
            if w != nil {
                let part = (q * act).sum(axis: -1, keepDims: true)
                own.dw = own.dw.map { $0 + part } ?? part
            }
            let dyBT = dyBT?[t]
            (own.hDown, ofF.dADown) = downF.products(
                act, wantsA ? w.flatMap { w in dyBT.map { w[t] * $0 } } ?? dyBT : nil, addedTo: (own.hDown, ofF.dADown))
            own.dGateBT = product(dGate, gateF.lora?.b.T, addedTo: own.dGateBT)
            own.dUpBT = product(dUp, upF.lora?.b.T, addedTo: own.dUpBT)
            ofF.dBGate = product(hGate?[t].T, dGate, addedTo: ofF.dBGate)
            ofF.dBUp = product(hUp?[t].T, dUp, addedTo: ofF.dBUp)
            own.dx = upF.weight.applyTransposed(
                dUp, times: upF.lora?.m,
                addedTo: gateF.weight.applyTransposed(dGate, times: gateF.lora?.m, addedTo: own.dx))
            (sums.tokens[place.0], sums.features[place.1]) = (own, ofF)
        }
        let (dx, dw, gradients) = total(sums, inputs[0], dy: inputs[1], w: w, wantsA: wantsA, machine)
        return machine.part(dx, dw, gradients)
    }

    private func total(
        _ sums: Sums, _ x: MLXArray, dy: MLXArray, w: MLXArray?, wantsA: Bool, _ machine: Machine
    ) -> (dx: MLXArray, dw: MLXArray?, gradients: LoRAGradients) {
        func whole(_ parts: [MLXArray?], axis: Int) -> MLXArray? {
            let parts = parts.arrays
            return parts.isEmpty ? nil : concatenated(parts, axis: axis)
        }
        let (dGateBT, dUpBT) = (whole(sums.tokens.map(\.dGateBT), axis: 0), whole(sums.tokens.map(\.dUpBT), axis: 0))
        let factor = down.factor
        var gradients = LoRAGradients()
        if wantsA {
            let x = x.asType(.float32)
            gradients.a[names.gate] = gate.products(x, dGateBT, machine: machine).xTg.map { $0 * factor }
            gradients.a[names.up] = up.products(x, dUpBT, machine: machine).xTg.map { $0 * factor }
            gradients.a[names.down] = whole(sums.features.map(\.dADown), axis: 0)
        }
        gradients.m[names.gate] = whole(sums.features.map(\.dGGate), axis: 0)
        gradients.m[names.up] = whole(sums.features.map(\.dGUp), axis: 0)
        gradients.m[names.down] = sums.dGDown
        gradients.b[names.gate] = whole(sums.features.map(\.dBGate), axis: 1)
        gradients.b[names.up] = whole(sums.features.map(\.dBUp), axis: 1)
        gradients.b[names.down] = whole(sums.tokens.map(\.hDown), axis: 0).map {
            matmul(($0 * factor).T, w.map { $0 * dy } ?? dy)
        }
        var dx = concatenated(sums.tokens.compactMap(\.dx))
        if gate.hasDropout {
            let (ofGate, ofUp) = (dGateBT.map { $0 * factor }, dUpBT.map { $0 * factor })
            dx = gate.adapterDx(ofGate, addedTo: dx, machine: machine) ?? dx
            dx = up.adapterDx(ofUp, addedTo: dx, machine: machine) ?? dx
        } else if let dyBT = whole([dGateBT, dUpBT], axis: 1), let a = whole([gate.lora?.a, up.lora?.a], axis: 1) {
            // Adds s d_gate Bᵀ Aᵀ of gate and s d_up Bᵀ Aᵀ of up.
            dx = addMM(dx, dyBT, a.T, alpha: factor)
        }
        var dw = whole(sums.tokens.map(\.dw), axis: 0)
        if let sum = dw, let bias = down.bias { dw = sum + matmul(dy, bias.asType(.float32)[0..., .newAxis]) }
        return (dx, dw, gradients)
    }
}

/// Returns a + b. A nil counts as 0; the result is nil if both are nil.
private func joined(_ a: MLXArray?, _ b: MLXArray?) -> MLXArray? {
    guard let a, let b else { return a ?? b }
    return a + b
}
