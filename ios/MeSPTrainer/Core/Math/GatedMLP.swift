import MLX
import MeSPAdapters
import MeSPBundle

/// A gated MLP or an expert: y = w down(H), H = act(gate(x)) ∘ up(x), where w is a factor for each token, or 1.
struct GatedMLP {
    let gate, up, down: LoRALinear
    let names: (gate: Projection, up: Projection, down: Projection)
    let activation: Activation

    /// Returns the MLP for some tokens and some features of H, without the bias of down.
    func part(tokens t: Range<Int>, features f: Range<Int>) -> GatedMLP {
        GatedMLP(
            gate: gate.rows(t).outputs(f), up: up.rows(t).outputs(f), down: down.rows(t).inputs(f), names: names,
            activation: activation)
    }

    func inner(_ x: MLXArray) -> (gate: MLXArray, up: MLXArray) { (gate(x), up(x)) }

    /// Returns sum + down(H) `[n, hidden]` in float32, without w, from gate(x) and up(x).
    func callAsFunction(_ gate: MLXArray, _ up: MLXArray, addedTo sum: MLXArray?) -> MLXArray {
        let whole = part(tokens: 0..<gate.dim(0), features: 0..<gate.dim(1))
        return biased(whole.applyDown(gate, up, addedTo: sum))
    }

    func applyDown(_ gate: MLXArray, _ up: MLXArray, addedTo sum: MLXArray?) -> MLXArray {
        let y = down(activation.gated(gate: gate, up: up))
        return sum.map { $0 + y } ?? y
    }

    func biased(_ sum: MLXArray) -> MLXArray { down.bias.map { sum + $0 } ?? sum }
}

/// The gradients:
///
///     Q = (G ∘ dy) Wd + s (dy Bdᵀ) Adᵀ ∘ M        dw = rowsum(Q ∘ H) + dy · bias of down        dH = w ∘ Q
///     d_gate, d_up from dH by the activation        dx = gate's dx from d_gate + up's dx from d_up
///
/// Wd, Ad, Bd, G and M are down's, see `LoRALinear`. The adapters' gradients are computed as there. The gradient of down's output is w ∘ dy. A
/// function that is called for a `part` returns the terms of sums.
extension GatedMLP {
    /// The inputs of the backward pass, for some tokens.
    struct Inputs {
        /// x and dy `[T, hidden]`, and w `[T, 1]`.
        var x, dy: MLXArray
        var w: MLXArray?
        /// gate and up of x; nil to recompute them.
        var kept: (gate: MLXArray, up: MLXArray)?
        /// s x̂ A of gate and up, and s dy Bdᵀ.
        var hGate, hUp, dyBT: MLXArray?

        func part(tokens t: Range<Int>, features f: Range<Int>) -> Inputs {
            Inputs(
                x: x[t], dy: dy[t], w: w?[t], kept: kept.map { ($0.gate[t, f], $0.up[t, f]) }, hGate: hGate?[t],
                hUp: hUp?[t], dyBT: dyBT?[t])
        }
    }

    /// H, the gradients of gate(x) and up(x), Q if there is a w, and x Wᵀ of gate and up if they were recomputed.
    struct InnerGradients: Arrays {
        let h, dGate, dUp: MLXArray
        let q, xGate, xUp: MLXArray?

        var arrays: [MLXArray] { [h, dGate, dUp] }
    }

    func innerBackward(_ i: Inputs) -> InnerGradients {
        func terms(_ linear: LoRALinear, _ xW: MLXArray?, _ h: MLXArray?) -> [MLXArray] {
            [xW, product(h, linear.lora?.b), linear.bias].arrays
        }
        let (xGate, xUp) = i.kept == nil ? (gate.weight.apply(i.x), up.weight.apply(i.x)) : (nil, nil)
        let qW = down.weightDx(i.dy, addedTo: nil)
        let q = down.adapterDx(i.dyBT, addedTo: qW) ?? qW
        let (h, dGate, dUp) = activation.gatedBackward(
            gate: i.kept.map { [$0.gate] } ?? terms(gate, xGate, i.hGate),
            up: i.kept.map { [$0.up] } ?? terms(up, xUp, i.hUp),
            factors: (gate.lora?.m, up.lora?.m), dAct: i.w.map { $0 * q } ?? q)
        return InnerGradients(h: h, dGate: dGate, dUp: dUp, q: i.w.map { _ in q }, xGate: xGate, xUp: xUp)
    }

    /// Sums over the features, for each token: dx without the adapters' terms; (H ∘ K) Ad; d_gate Bᵀ with gate's B, and d_up Bᵀ with up's B;
    /// rowsum(Q ∘ H).
    struct TokenSums: Arrays {
        var dx, hDown, dGateBT, dUpBT, dw: MLXArray?

        var arrays: [MLXArray] { [dx, hDown, dGateBT, dUpBT, dw].arrays }

        static func joined(_ parts: [TokenSums]) -> TokenSums {
            func whole(_ sum: KeyPath<TokenSums, MLXArray?>) -> MLXArray? {
                MeSPCore.joined(parts.map { $0[keyPath: sum] }, axis: 0)
            }
            return TokenSums(
                dx: whole(\.dx), hDown: whole(\.hDown), dGateBT: whole(\.dGateBT), dUpBT: whole(\.dUpBT),
                dw: whole(\.dw))
        }
    }

    /// Sums over the tokens, for each feature: the gradients of Ad, of gate's and up's B, and of their G.
    struct FeatureSums: Arrays {
        var dADown, dBGate, dBUp, dGGate, dGUp: MLXArray?

        var arrays: [MLXArray] { [dADown, dBGate, dBUp, dGGate, dGUp].arrays }

        static func joined(_ parts: [FeatureSums]) -> FeatureSums {
            func whole(_ sum: KeyPath<FeatureSums, MLXArray?>, axis: Int) -> MLXArray? {
                MeSPCore.joined(parts.map { $0[keyPath: sum] }, axis: axis)
            }
            return FeatureSums(
                dADown: whole(\.dADown, axis: 0), dBGate: whole(\.dBGate, axis: 1), dBUp: whole(\.dBUp, axis: 1),
                dGGate: whole(\.dGGate, axis: 0), dGUp: whole(\.dGUp, axis: 0))
        }
    }

    func addTerms(
        of d: InnerGradients, _ i: Inputs, wanted: LoRALinear.Wanted, to ofTokens: inout TokenSums,
        _ ofFeatures: inout FeatureSums
    ) {
        if let q = d.q { ofTokens.dw = joined(ofTokens.dw, (q * d.h).sum(axis: -1, keepDims: true)) }
        if wanted != .none {
            (ofTokens.hDown, ofFeatures.dADown) = down.products(
                d.h, wanted == .all ? i.w.flatMap { w in i.dyBT.map { w * $0 } } ?? i.dyBT : nil,
                addedTo: (ofTokens.hDown, ofFeatures.dADown))
            ofFeatures.dBGate = product(i.hGate?.T, d.dGate, addedTo: ofFeatures.dBGate)
            ofFeatures.dBUp = product(i.hUp?.T, d.dUp, addedTo: ofFeatures.dBUp)
        }
        ofTokens.dGateBT = product(d.dGate, gate.lora?.b.T, addedTo: ofTokens.dGateBT)
        ofTokens.dUpBT = product(d.dUp, up.lora?.b.T, addedTo: ofTokens.dUpBT)
        ofTokens.dx = up.weightDx(d.dUp, addedTo: gate.weightDx(d.dGate, addedTo: ofTokens.dx))
    }

    /// Adds the terms of the gradients of gate's and up's G, with DoRA.
    func addMagnitudeTerms(of d: InnerGradients, to sums: inout FeatureSums) {
        func dG(_ linear: LoRALinear, _ dy: MLXArray, _ xW: MLXArray?) -> MLXArray? {
            linear.lora?.m == nil ? nil : xW.map { (dy * $0).sum(axis: 0) }
        }
        sums.dGGate = joined(sums.dGGate, dG(gate, d.dGate, d.xGate))
        sums.dGUp = joined(sums.dGUp, dG(up, d.dUp, d.xUp))
    }

    /// Returns the gradients of the adapters, but for those of gate's and up's A, from the sums of all features and tokens.
    func gradients(_ tokens: TokenSums, _ features: FeatureSums, dGDown: MLXArray?, _ i: Inputs) -> LoRAGradients {
        var gradients = LoRAGradients()
        gradients.a[names.down] = features.dADown
        gradients.m[names.gate] = features.dGGate
        gradients.m[names.up] = features.dGUp
        gradients.m[names.down] = dGDown
        gradients.b[names.gate] = features.dBGate
        gradients.b[names.up] = features.dBUp
        gradients.b[names.down] = down.dB(tokens.hDown, dy: i.w.map { $0 * i.dy } ?? i.dy)
        return gradients
    }

    /// Returns dw `[T, 1]`; nil without w.
    func dw(_ sums: TokenSums, dy: MLXArray) -> MLXArray? {
        guard let dw = sums.dw, let bias = down.bias else { return sums.dw }
        return dw + matmul(dy, bias.asType(.float32)[0..., .newAxis])
    }

    /// Returns dx without dropout: adds s d_gate Bᵀ Aᵀ of gate and s d_up Bᵀ Aᵀ of up to the sum.
    func dx(_ sums: TokenSums) -> MLXArray? {
        guard let dx = sums.dx, let dyBT = joined([sums.dGateBT, sums.dUpBT], axis: 1),
            let a = joined([gate.lora?.a, up.lora?.a], axis: 1)
        else { return sums.dx }
        return addMM(dx, dyBT, a.T, alpha: gate.factor)
    }
}

/// Returns the arrays that are not nil, concatenated; nil if all are.
func joined(_ parts: [MLXArray?], axis: Int) -> MLXArray? {
    let parts = parts.arrays
    return parts.isEmpty ? nil : concatenated(parts, axis: axis)
}

/// Returns a + b. A nil counts as 0; the result is nil if both are nil.
func joined(_ a: MLXArray?, _ b: MLXArray?) -> MLXArray? {
    guard let a, let b else { return a ?? b }
    return a + b
}
