import MLX
import MeSPAdapters
import MeSPBundle

/// The mixture of experts: y = Σ w_e down_e(act(gate_e(x)) ∘ up_e(x)) over a token's experts, with the router's weights w.
///
/// An expert's matrices are read once for each group of at most `most` tokens.
extension Block {
    func mixtureOfExperts(_ experts: Experts, _ mlpIn: MLXArray) -> MLXArray {
        // The backward pass uses the same tiles, so that the router chooses the same experts.
        let parts = tiles(of: mlpIn.dim(0), size: schedule.mlpTokens).map { rows in
            let (x, block) = (mlpIn[rows].asType(.float32), from(rows.lowerBound))
            let routed = Routed(experts, weights, x, most: most(rows.count), schedule)
            var none = [MLXArray]()
            return schedule.reduce(routed.byExpert, MLXArray.zeros(x.shape), reading: &none) { y, pairs, _ in
                let out = tiled(block.expert(experts, pairs))(
                    x[pairs.tokens], features: features(experts, of: pairs), addedTo: nil)
                y = y.at[pairs.tokens].add(routed.weights(pairs) * out)
            }
        }
        return concatenated(parts)
    }

    func mixtureOfExpertsBackward(
        _ experts: Experts, _ mlpIn: MLXArray, dy: MLXArray, addedTo dx: inout MLXArray,
        _ gradients: inout LoRAGradients
    ) {
        let x = mlpIn.asType(.float32)
        let routed = Routed(experts, weights, x, most: most(mlpIn.dim(0)), schedule)
        var dws = [MLXArray]()
        for pairs in routed.byExpert {
            let d = tiled(expert(experts, pairs)).backward(
                x[pairs.tokens], dy: dy[pairs.tokens], w: routed.weights(pairs), wanted: wanted,
                tile: (pairs.count, features(experts, of: pairs)))
            dx = dx.at[pairs.tokens].add(d.dx)
            dws += d.dw.arrays
            gradients.experts[pairs.expert, default: LoRAGradients()].add(d.gradients)
            schedule.part(dx, gradients.experts[pairs.expert])
        }
        dx = schedule.stage(
            weights.router(experts).applyTransposed(routed.backward(dw: concatenated(dws)), addedTo: dx))
    }

    private func expert(_ experts: Experts, _ pairs: Routed.Pairs) -> GatedMLP {
        func linear(_ weight: QuantizedMatrix, _ projection: Projection) -> LoRALinear {
            layer(weight, projection, expert: pairs.expert, tokens: pairs.positions)
        }
        let (gate, up, down) = weights.expert(experts, pairs.expert)
        return GatedMLP(
            gate: linear(gate, .expertGate), up: linear(up, .expertUp), down: linear(down, .expertDown),
            names: (.expertGate, .expertUp, .expertDown), activation: weights.activation)
    }

    /// Returns the largest number of tokens that an expert takes at a time: a quarter of all tokens, but at least 64. The limit bounds the memory if
    /// the router sends most tokens to one expert.
    private func most(_ tokens: Int) -> Int { max(64, (tokens + 3) / 4) }

    /// Fewer tokens allow more features.
    private func features(_ experts: Experts, of pairs: Routed.Pairs) -> Int {
        min(schedule.features, experts.intermediateSize) * max(1, schedule.mlpTokens / pairs.count)
    }
}

private struct Routed {
    /// A pair is a token and one of its experts.
    struct Pairs {
        let expert: Int
        let positions: [Int]
        /// The rows of the tokens `[count]`.
        let tokens: MLXArray
        /// The indices of the pairs among all `T · k` pairs `[count]`.
        let places: [Int32]

        var count: Int { positions.count }
    }

    /// An expert with many tokens has several elements.
    let byExpert: [Pairs]
    /// The experts of each token `[T · k]`.
    private let chosen: [Int32]
    /// The router's outputs for the chosen experts, and their weights, `[T, k]` each.
    private let z, w: MLXArray
    private let experts: Experts

    /// - Parameters:
    ///   - x: `[T, hidden]`, in float32
    ///   - most: the maximum number of tokens in an element of `byExpert`
    init(_ experts: Experts, _ weights: BlockWeights, _ x: MLXArray, most: Int, _ schedule: Schedule) {
        self.experts = experts
        let (all, perToken) = (weights.router(experts).apply(x), Int32(experts.numExpertsPerTok))
        // The numbers are addresses, so they are confirmed. After an MLX error they cannot be read. Then any experts are used, because the block's
        // result is discarded.
        chosen =
            (try? weights.chosen(experts, all).numbers(Int32.self))
            ?? (0..<Int32(x.dim(0)) * perToken).map { $0 % Int32(experts.numExperts) }
        let z = takeAlong(all, .of(chosen, [x.dim(0), Int(perToken)]), axis: -1)
        (self.z, w) = schedule.part(z, experts.weights(z))
        var places = [[Int32]](repeating: [], count: experts.numExperts)
        for (place, expert) in chosen.enumerated() { places[Int(expert)].append(Int32(place)) }
        byExpert = places.enumerated().flatMap { expert, places in
            tiles(of: places.count, size: most).map { some in
                let tokens = places[some].map { $0 / perToken }
                return Pairs(
                    expert: expert, positions: tokens.map { Int($0) }, tokens: .of(tokens),
                    places: Array(places[some]))
            }
        }
    }

    func weights(_ pairs: Pairs) -> MLXArray {
        w.flattened().take(.of(pairs.places), axis: 0).expandedDimensions(axis: -1)
    }

    /// Returns dz `[T, E]` from dw of all pairs in the order of `byExpert`. dz is 0 for experts that were not chosen.
    func backward(dw: MLXArray) -> MLXArray {
        var order = [Int32](repeating: 0, count: chosen.count)
        for (index, place) in byExpert.flatMap(\.places).enumerated() { order[Int(place)] = Int32(index) }
        let dz = experts.weightsBackward(z, dw: dw.flattened().take(.of(order), axis: 0).reshaped(z.shape))
        let (all, perToken) = (experts.numExperts, experts.numExpertsPerTok)
        let places = chosen.enumerated().map { Int32($0 / perToken * all) + $1 }
        return MLXArray.zeros([z.dim(0) * all]).at[MLXArray.of(places)].add(dz.flattened()).reshaped([z.dim(0), all])
    }
}
