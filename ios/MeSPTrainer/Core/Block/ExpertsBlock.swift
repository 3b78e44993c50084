import MLX
import MeSPBundle

/// The mixture of experts: y = Σ w_e down_e(act(gate_e(x)) ∘ up_e(x)) over a token's experts, with the w of Router.swift.
///
/// The pairs of a token and one of its experts are sorted by expert, so that each expert's matrices are read once, or a few times where
/// many tokens chose it, and those of an expert without tokens not at all. Sums go in the experts' order.
extension Block {
    /// The mixture of each token, `[n, hidden]` in float32.
    func mixture(_ experts: Experts, _ mlpIn: MLXArray) -> MLXArray {
        // The tokens that the derivative takes at a time, so that it makes the same choice.
        let parts = tiles(of: mlpIn.dim(0), size: tile.mlpTokens).map { rows in
            let x = mlpIn[rows].asType(.float32)
            let routed = Routed(experts, weights, x, most: most(rows.count))
            var y = MLXArray.zeros(x.shape)
            for pairs in routed.byExpert {
                let (gate, up, down) = expert(experts, pairs.expert)
                let some = x[pairs.tokens]
                var out: MLXArray?
                for f in features(experts, of: pairs) {
                    let act = weights.activation.gated(gate: gate.outputs(f)(some), up: up.outputs(f)(some))
                    let part = down.inputs(f)(act)
                    out = out.map { $0 + part } ?? part
                    if f.count < experts.intermediateSize { eval([out].compactMap { $0 }) }
                }
                if let out { y = y.at[pairs.tokens].add(routed.weights(pairs) * out) }
                if x.dim(0) > QuantizedMatrix.fewRows { tile.pace.finish([y]) }
            }
            return y
        }
        return concatenated(parts)
    }

    /// The derivative: by each expert, and through the router, whose matrix is R, dx += dz R.
    ///
    /// - Parameters:
    ///   - mlpIn: `[n, hidden]`
    ///   - dy: alike, in float32
    ///   - dx: to which its dx is added, in float32; evaluated.
    ///   - gradients: to which those of the experts' adapters are added
    func mixtureBackward(
        _ experts: Experts, _ mlpIn: MLXArray, dy: MLXArray, addedTo dx: inout MLXArray,
        _ gradients: inout LoRAGradients
    ) {
        let x = mlpIn.asType(.float32)
        let routed = Routed(experts, weights, x, most: most(mlpIn.dim(0)))
        var dws = [MLXArray]()
        for pairs in routed.byExpert {
            let (dX, dw, own) = expertBackward(
                expert(experts, pairs.expert), x[pairs.tokens], dy: dy[pairs.tokens], w: routed.weights(pairs),
                by: features(experts, of: pairs))
            if let dX, let dw {
                dx = dx.at[pairs.tokens].add(dX)
                dws.append(dw)
            }
            gradients.experts[pairs.expert, default: LoRAGradients()].add(own)
            tile.pace.finish([dx] + (gradients.experts[pairs.expert]?.arrays ?? []))
        }
        dx = weights.router(experts).applyTransposed(routed.backward(dw: concatenated(dws)), addedTo: dx)
        tile.endPhase([dx])
    }

    private typealias Expert = (gate: LoRALinear, up: LoRALinear, down: LoRALinear)

    /// An expert with its adapters.
    private func expert(_ experts: Experts, _ number: Int) -> Expert {
        func linear(_ weight: QuantizedMatrix, _ projection: Projection) -> LoRALinear {
            let lora = matrices(projection).map { LoRAMatrices(a: $0.a[number], b: $0.b[number]) }
            return LoRALinear(weight: weight, bias: nil, lora: lora, scale: scale)
        }
        let (gate, up, down) = weights.expert(experts, number)
        return (linear(gate, .expertGate), linear(up, .expertUp), linear(down, .expertDown))
    }

    /// The derivative of w ∘ down(H), H = act(g) ∘ u, by an expert's rows X, with g and u what gate and up give of X:
    ///
    ///     Q = dY Wd + s (dY Bdᵀ) Adᵀ        dw = rowsum(Q ∘ H)        dH = w ∘ Q        dX = by gate of dg + by up of du
    ///
    /// so that the output of down is not made again. The adapters' gradients are those of `linearBackward`, where down's output has the
    /// gradient w ∘ dY.
    ///
    /// - Parameters:
    ///   - features: those of H that are computed at a time
    /// - Returns: dX `[n, hidden]` and dw `[n]`, nil where there are no features
    private func expertBackward(
        _ expert: Expert, _ x: MLXArray, dy: MLXArray, w: MLXArray, by features: [Range<Int>]
    ) -> (dX: MLXArray?, dw: MLXArray?, gradients: LoRAGradients) {
        let (gateLoRA, upLoRA, downLoRA) = (expert.gate.lora, expert.up.lora, expert.down.lora)
        // s X A, and s dY Bᵀ of down
        let (hGate, hUp) = (gateLoRA.map { matmul(x, $0.a) * scale }, upLoRA.map { matmul(x, $0.a) * scale })
        let dyB = downLoRA.map { matmul(dy, $0.b.T) * scale }
        var (dX, dw): (MLXArray?, MLXArray?) = (nil, nil)
        // H A of down, d_gate Bᵀ of gate, d_up Bᵀ of up. Of the features: dA of down, dB of gate and of up.
        var (hDown, dGateB, dUpB): (MLXArray?, MLXArray?, MLXArray?) = (nil, nil, nil)
        var (dADown, dBGate, dBUp) = ([MLXArray](), [MLXArray](), [MLXArray]())
        for f in features {
            let (gate, up, down) = (expert.gate.outputs(f), expert.up.outputs(f), expert.down.inputs(f))
            let qW = down.weight.applyTransposed(dy, addedTo: nil)
            let q = product(dyB, down.lora?.a.T, addedTo: qW) ?? qW
            let d = weights.activation.gatedBackward(
                gate: [gate.weight.apply(x), product(hGate, gate.lora?.b)].compactMap { $0 },
                up: [up.weight.apply(x), product(hUp, up.lora?.b)].compactMap { $0 }, dAct: w * q)
            let part = (q * d.act).sum(axis: -1)
            dw = dw.map { $0 + part } ?? part
            hDown = product(d.act, down.lora?.a, addedTo: hDown)
            dGateB = product(d.dGate, gate.lora?.b.T, addedTo: dGateB)
            dUpB = product(d.dUp, up.lora?.b.T, addedTo: dUpB)
            dADown += [product(d.act.T, wantsA ? dyB.map { w * $0 } : nil)].compactMap { $0 }
            dBGate += [product(hGate?.T, d.dGate)].compactMap { $0 }
            dBUp += [product(hUp?.T, d.dUp)].compactMap { $0 }
            dX = up.weight.applyTransposed(d.dUp, addedTo: gate.weight.applyTransposed(d.dGate, addedTo: dX))
            let sums = [dX, dw, hDown, dGateB, dUpB].compactMap { $0 }
            tile.pace.finish(sums + dADown.suffix(1) + dBGate.suffix(1) + dBUp.suffix(1))
        }
        dX = product(dGateB.map { $0 * scale }, gateLoRA?.a.T, addedTo: dX)
        dX = product(dUpB.map { $0 * scale }, upLoRA?.a.T, addedTo: dX)

        func whole(_ parts: [MLXArray], axis: Int) -> MLXArray? {
            parts.isEmpty ? nil : concatenated(parts, axis: axis)
        }
        var gradients = LoRAGradients()
        if wantsA {
            gradients.a[.expertGate] = product(x.T, dGateB).map { $0 * scale }
            gradients.a[.expertUp] = product(x.T, dUpB).map { $0 * scale }
            gradients.a[.expertDown] = whole(dADown, axis: 0)
        }
        (gradients.b[.expertGate], gradients.b[.expertUp]) = (whole(dBGate, axis: 1), whole(dBUp, axis: 1))
        gradients.b[.expertDown] = hDown.map { matmul(($0 * scale).T, w * dy) }
        return (dX, dw, gradients)
    }

    /// w = σ(x gᵀ) `[n, 1]`, by which the output of the MLP beside the experts is multiplied.
    func factor(_ g: QuantizedMatrix, _ mlpIn: MLXArray) -> MLXArray { sigmoid(g.apply(mlpIn.asType(.float32))) }

    /// The derivative of w ∘ out by out, and by z = x gᵀ. The MLP's output is made again for it.
    ///
    ///     d_out = w ∘ dy        dz = w (1 − w) rowsum(dy ∘ out)        dx = dz g
    ///
    /// - Returns: d_out `[n, hidden]` and dz `[n, 1]` in float32, evaluated.
    func factorBackward(_ g: QuantizedMatrix, _ mlpIn: MLXArray, dy: MLXArray) -> (dOut: MLXArray, dz: MLXArray) {
        let (w, out) = (factor(g, mlpIn), gatedMLP(mlpIn, addedTo: nil).out)
        let (dOut, dz) = (w * dy, w * (1 - w) * (dy * out).sum(axis: -1, keepDims: true))
        eval(dOut, dz)
        return (dOut, dz)
    }

    /// The most of n tokens that an expert takes at a time, so that memory does not depend on the choice: an expert is that of a quarter
    /// of them at most where the router spreads them, and of all where it does not.
    private func most(_ tokens: Int) -> Int { max(64, (tokens + 3) / 4) }

    /// The features of an expert that are computed at a time: as many numbers as of the MLP, whose tiles have more tokens.
    private func features(_ experts: Experts, of pairs: Routed.Pairs) -> [Range<Int>] {
        let width = experts.intermediateSize
        return tiles(of: width, size: min(tile.mlp, width) * max(1, tile.mlpTokens / pairs.count))
    }
}

/// Some tokens, by the experts that they chose.
private struct Routed {
    /// Tokens of one expert.
    struct Pairs {
        let expert: Int
        let count: Int
        /// Their rows `[count]`, and the places of the pairs among all `[T · k]`.
        let tokens, places: MLXArray
    }

    /// In the experts' order, without those that no token chose; several of an expert with many tokens.
    let byExpert: [Pairs]
    /// The experts of each token, what the router gives for them and their weights, `[T, k]`.
    private let chosen, z, w: MLXArray
    private let experts: Experts

    /// - Parameters:
    ///   - x: `[T, hidden]`, in float32
    ///   - most: tokens of `Pairs`
    init(_ experts: Experts, _ weights: BlockWeights, _ x: MLXArray, most: Int) {
        self.experts = experts
        let all = weights.router(experts).apply(x)
        let chosen = weights.chosen(experts, all)
        z = takeAlong(all, chosen, axis: -1)
        w = experts.weights(z)
        eval(chosen, z, w)
        self.chosen = chosen
        var places = [[Int32]](repeating: [], count: experts.numExperts)
        // After an error of MLX any experts will do: nothing of the block is used then.
        let numbers = (try? chosen.numbers(Int32.self)) ?? (0..<chosen.size).map { Int32($0 % experts.numExperts) }
        for (place, expert) in numbers.enumerated() { places[Int(expert)].append(Int32(place)) }
        let perToken = Int32(experts.numExpertsPerTok)
        byExpert = places.enumerated().flatMap { expert, places in
            tiles(of: places.count, size: most).map { some in
                Pairs(
                    expert: expert, count: some.count, tokens: MLXArray(places[some].map { $0 / perToken }),
                    places: MLXArray(Array(places[some])))
            }
        }
    }

    /// The weights of an expert's pairs `[count, 1]`.
    func weights(_ pairs: Pairs) -> MLXArray {
        w.flattened().take(pairs.places, axis: 0).expandedDimensions(axis: -1)
    }

    /// dz `[T, E]`, 0 of experts that were not chosen, from dw of all pairs in the order of `byExpert`.
    func backward(dw: MLXArray) -> MLXArray {
        let order = argSort(concatenated(byExpert.map(\.places)))
        let dz = experts.weightsBackward(z, dw: dw.take(order, axis: 0).reshaped(z.shape))
        let rows = MLXArray((0..<Int32(z.dim(0))).map { $0 * Int32(experts.numExperts) }).expandedDimensions(axis: -1)
        return MLXArray.zeros([z.dim(0) * experts.numExperts])
            .at[(rows + chosen.asType(.int32)).flattened()].add(dz.flattened()).reshaped([z.dim(0), experts.numExperts])
    }
}
