import MLX
import MeSPAdapters

/// The gated MLP, for some tokens and some features at a time.
extension Tiled where Formula == GatedMLP {
    /// Returns sum + down(H) `[n, hidden]` in float32, without the factor w.
    ///
    /// - Parameter size: the number of features in a tile; nil for `features`
    func callAsFunction(_ x: MLXArray, features size: Int? = nil, addedTo sum: MLXArray?) -> MLXArray {
        let features = tiles(of: formula.gate.weight.rows, size: size ?? schedule.features)
        func overFeatures(_ t: Range<Int>, _ x: MLXArray, addedTo sum: consuming MLXArray?) -> MLXArray {
            var none = [MLXArray]()
            let y = schedule.reduce(features, sum, reading: &none) { sum, f, _ in
                let tile = formula.part(tokens: t, features: f)
                let (gate, up) = schedule.part(tile.gate(x), tile.up(x))
                sum = tile.applyDown(gate, up, addedTo: sum)
            }
            guard let y else { preconditionFailure("an MLP without features") }
            return formula.biased(y)
        }
        let tokens = tiles(of: x.dim(0), size: schedule.mlpTileTokens)
        guard tokens.count > 1 else { return overFeatures(0..<x.dim(0), x, addedTo: sum) }
        var inputs = [x] + sum.arrays
        return concatenated(
            schedule.reduce(tokens, [MLXArray](), reading: &inputs) { parts, t, inputs in
                parts.append(overFeatures(t, inputs[0][t], addedTo: inputs.count > 1 ? inputs[1][t] : nil))
            })
    }

    /// - Parameters:
    ///   - kept: gate and up of x; nil to recompute them
    ///   - tile: the numbers of tokens and features in a tile; the tile has all tokens or all features; nil for the schedule's
    /// - Returns: dx `[n, hidden]` and dw `[n, 1]` in float32, and the gradients of the adapters. dw is nil without w.
    func backward(
        _ x: MLXArray, kept: (gate: MLXArray, up: MLXArray)? = nil, dy: MLXArray, w: MLXArray? = nil,
        wanted: LoRALinear.Wanted, tile: (tokens: Int, features: Int)? = nil
    ) -> (dx: MLXArray, dw: MLXArray?, gradients: LoRAGradients) {
        let tile = tile ?? (schedule.mlpTileTokens, schedule.features)
        let (tokens, features) = (
            tiles(of: x.dim(0), size: tile.tokens), tiles(of: formula.gate.weight.rows, size: tile.features)
        )
        let hasG = [formula.gate, formula.up, formula.down].contains { $0.lora?.m != nil }
        var all = {
            let wide = x.asType(.float32)
            return GatedMLP.Inputs(
                x: x, dy: dy, w: w, kept: hasG ? nil : kept, hGate: formula.gate.h(wide), hUp: formula.up.h(wide),
                dyBT: formula.down.dyBT(dy))
        }()
        var inputs = schedule.inputs([x, dy], after: [x] + [all.hGate, all.hUp, all.dyBT].arrays)
        let none = MLPSums(tokens: tokens.map { _ in .init() }, features: features.map { _ in .init() })
        let places = tokens.indices.flatMap { t in features.indices.map { f in (t: t, f: f) } }
        let sums = schedule.reduce(places, none, reading: &inputs) { sums, place, inputs in
            sums.last = place
            let (t, f) = (tokens[place.t], features[place.f])
            let tile = formula.part(tokens: t, features: f)
            (all.x, all.dy) = (inputs[0], inputs[1])
            let i = all.part(tokens: t, features: f)
            let d = tile.innerBackward(i)
            if hasG, wanted != .none {
                schedule.part(d)
                tile.addMagnitudeTerms(of: d, to: &sums.features[place.f])
                schedule.part(sums.features[place.f].dGGate, sums.features[place.f].dGUp)
                sums.dGDown = joined(sums.dGDown, tiled(tile.down).dG(d.h, dy: i.w.map { $0 * i.dy } ?? i.dy))
            }
            tile.addTerms(of: d, i, wanted: wanted, to: &sums.tokens[place.t], &sums.features[place.f])
        }
        (all.x, all.dy) = (inputs[0], inputs[1])
        let ofTokens = GatedMLP.TokenSums.joined(sums.tokens)
        var gradients = formula.gradients(ofTokens, .joined(sums.features), dGDown: sums.dGDown, all)
        if wanted == .all {
            let x = all.x.asType(.float32)
            func dA(_ linear: LoRALinear, _ dyBT: MLXArray?) -> MLXArray? {
                tiled(linear).products(x, dyBT).xTg.map { $0 * linear.factor }
            }
            gradients.a[formula.names.gate] = dA(formula.gate, ofTokens.dGateBT)
            gradients.a[formula.names.up] = dA(formula.up, ofTokens.dUpBT)
        }
        var dx = ofTokens.dx
        if formula.gate.hasDropout {
            for (linear, dyBT) in [(formula.gate, ofTokens.dGateBT), (formula.up, ofTokens.dUpBT)] {
                dx = tiled(linear).adapterDx(dyBT.map { $0 * linear.factor }, addedTo: dx)
            }
        } else {
            dx = formula.dx(ofTokens)
        }
        guard let dx else { preconditionFailure("an MLP without features") }
        return schedule.part(dx, formula.dw(ofTokens, dy: all.dy), gradients)
    }
}

private struct MLPSums: Arrays {
    var tokens: [GatedMLP.TokenSums]
    var features: [GatedMLP.FeatureSums]
    var dGDown: MLXArray?
    var last = (t: 0, f: 0)

    var arrays: [MLXArray] { tokens[last.t].arrays + features[last.f].arrays + dGDown.arrays }
}
