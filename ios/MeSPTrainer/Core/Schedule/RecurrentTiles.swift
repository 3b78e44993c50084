import MLX

/// Evaluates the arrays of all chunks before those that read them.
extension Tiled where Formula == GatedDeltaRule {
    /// Returns o `[n, value_heads, value_dim]`, in float32.
    func callAsFunction(state: inout MLXArray) -> MLXArray {
        formula.length == 1 ? formula.step(state: &state) : formula.output(schedule.part(formula.chunks), state: &state)
    }

    /// - Parameters:
    ///   - dO: `[T, value_heads, value_dim]`
    ///   - state: S before the tokens, `[value_heads, key_dim, value_dim]`
    ///   - dState: the gradient of S after the tokens, replaced by the gradient of S before them
    /// - Returns: dq and dk `[T, key_heads, key_dim]`, dv `[T, value_heads, value_dim]`, dκ and β dβ `[T, value_heads]`, in float32.
    func backward(
        dO: MLXArray, state: MLXArray, dState: inout MLXArray
    ) -> (dq: MLXArray, dk: MLXArray, dv: MLXArray, dLogDecay: MLXArray, betaDBeta: MLXArray) {
        let (c, dO) = (schedule.part(formula.chunks), formula.chunked(dO))
        let (d, states, dD, dStates) = recurrenceBackward(c, dO, state, &dState)
        let values = formula.valuesBackward(c, d: d, dD: dD)
        let (dv, betaDBeta) = schedule.part(values.dv, values.betaDBeta)
        let products = formula.productsBackward(c, dO, d: d, states: states, dv: dv, dStates: dStates)
        let (inWhole, dP, dA) = schedule.part(products.inWhole, products.dP, products.dA)
        let queries = formula.queriesBackward(c, dO, states: states, dP: dP)
        schedule.part(queries.dq, queries.inStart)
        let start = formula.startBackward(c, states: states, dv: dv)
        schedule.part(start.dk, start.inStart)
        let keys = formula.keysBackward(
            c, d: d, dStates: dStates, dP: dP, dA: dA, inWhole: inWhole, inQStart: queries.inStart, start: start)
        let results = schedule.part([queries.dq, keys.dk, dv, keys.dLogDecay, betaDBeta].map(formula.byToken))
        return (results[0], results[1], results[2], results[3].squeezed(axis: -1), results[4].squeezed(axis: -1))
    }

    private func recurrenceBackward(
        _ c: GatedDeltaRule.Chunks, _ dO: MLXArray, _ state: MLXArray, _ dState: inout MLXArray
    ) -> (d: MLXArray, states: MLXArray, dD: MLXArray, dStates: MLXArray) {
        let w = formula.w(c)
        let (d, states, _) = formula.corrections(c, w: w, state: state)
        schedule.part(w, d, states)
        let (dD, dStates) = formula.statesBackward(c, w: w, dO, dState: &dState)
        schedule.part(dD, dStates, dState)
        return (d, states, dD, dStates)
    }
}

/// The gated delta net, for some heads at a time.
extension Tiled where Formula == GatedDeltaNet {
    private func heads(_ length: Int) -> [Range<Int>] {
        tiles(of: formula.keyHeads, size: min(formula.keyHeads, max(1, schedule.bytes / formula.bytesOfHead(length))))
    }

    private func rule(
        _ heads: Range<Int>, qkv: MLXArray, tail: MLXArray, b: MLXArray, a: MLXArray
    ) -> Tiled<GatedDeltaRule> {
        tiled(formula.rule(heads, qkv: formula.inputs(heads).map { schedule.part($0(qkv, tail: tail)) }, b: b, a: a))
    }

    /// Returns o `[n, value_heads · value_dim]`, in float32.
    /// - Parameters:
    ///   - qkv: `[n, F]`
    ///   - b, a: `[n, value_heads]`
    func callAsFunction(
        qkv: MLXArray, b: MLXArray, a: MLXArray, state: inout MixerState.Recurrent
    ) -> MLXArray {
        let before = state
        let parts = schedule.each(heads(qkv.dim(0))) { heads in
            var memory = before.memory[formula.valueHeads(of: heads)]
            let o = rule(heads, qkv: qkv, tail: before.tail, b: b, a: a)(state: &memory)
            return [o.reshaped([o.dim(0), -1]), memory]
        }
        state.memory = concatenated(parts.map { $0[1] })
        state.tail = formula.convolution.tail(after: qkv, tail: before.tail)
        return concatenated(parts.map { $0[0] }, axis: -1)
    }

    /// Returns the gradients of qkv, b and a, for a whole sequence or a segment. Recomputes the intermediates.
    ///
    /// - Parameters:
    ///   - qkv: `[T, F]`, freed after its last use
    ///   - records: the rows of each record, which has its own state; nil for one record
    ///   - before: the state before a segment of one record; nil for the start of a sequence
    func backward(
        qkv: consuming MLXArray, b: MLXArray, a: MLXArray, dO: consuming MLXArray,
        records: [Range<Int>]? = nil, before: MixerState.Recurrent? = nil,
        carried: inout GatedDeltaNet.CarriedGradients?
    ) -> (dQKV: MLXArray, dB: MLXArray, dA: MLXArray) {
        let state = before ?? formula.start(dtype: qkv.dtype)
        let later = carried
        var inputs = [consume qkv, b, a, consume dO]
        let records = records ?? [0..<b.dim(0)]
        let all = schedule.reduce(heads(b.dim(0)), NetGradients(), reading: &inputs) { all, heads, inputs in
            all.gradients.append(
                eachRecord(records) {
                    var own = formula.parts(heads, later ?? formula.noCarriedGradients)
                    let d = backward(
                        heads, qkv: inputs[0][$0], b: inputs[1][$0], a: inputs[2][$0], dO: inputs[3][$0],
                        before: state, carried: &own)
                    if later != nil { all.carried.append(own) }
                    return d
                })
        }
        inputs = []
        if carried != nil {
            let convolved = (0..<3).flatMap { index in all.carried.map { $0[1 + index] } }
            carried = .init(
                memory: concatenated(all.carried.map { $0[0] }), convolved: concatenated(convolved, axis: -1))
        }
        func whole(_ indices: Range<Int>) -> MLXArray {
            concatenated(indices.flatMap { index in all.gradients.map { $0[index] } }, axis: -1)
        }
        return schedule.part(whole(0..<3), whole(3..<4), whole(4..<5))
    }

    private func backward(
        _ heads: Range<Int>, qkv: MLXArray, b: MLXArray, a: MLXArray, dO: MLXArray,
        before: MixerState.Recurrent, carried: inout [MLXArray]
    ) -> [MLXArray] {
        let d = rule(heads, qkv: qkv, tail: before.tail, b: b, a: a).backward(
            dO: formula.byHead(dO, heads), state: before.memory[formula.valueHeads(of: heads)], dState: &carried[0])
        let dQKV = zip(formula.inputs(heads), [d.dq, d.dk, d.dv]).enumerated().map { i, input in
            let dx = input.0.backward(qkv, tail: before.tail, dy: input.1, carried: &carried[1 + i])
            return schedule.part(dx, carried[1 + i]).0
        }
        return dQKV + formula.gatesBackward(heads, b: b, a: a, betaDBeta: d.betaDBeta, dLogDecay: d.dLogDecay)
    }
}

/// Mamba-2, for some heads at a time.
extension Tiled where Formula == Mamba2 {
    private func heads(ofGroup group: Int, _ length: Int) -> [Range<Int>] {
        let most = max(1, schedule.bytes / formula.bytesOfHead(length))
        return tiles(of: formula.heads / formula.groups, size: most).map { formula.headRange(of: group, $0) }
    }

    /// Returns o `[n, heads · P]`, in float32.
    /// - Parameters:
    ///   - xBC: `[n, F]`
    ///   - dt: `[n, heads]`
    func callAsFunction(xBC: MLXArray, dt: MLXArray, state: inout MixerState.Recurrent) -> MLXArray {
        let before = state
        let parts = schedule.each(tiles(of: formula.groups, size: 1)) { group in
            let group = group.lowerBound
            let (b, c) = (
                formula.input(.b(group), xBC, tail: before.tail), formula.input(.c(group), xBC, tail: before.tail)
            )
            return schedule.each(heads(ofGroup: group, xBC.dim(0))) { heads in
                var memory = before.memory[heads]
                let x = formula.byHead(formula.input(.x(heads), xBC, tail: before.tail))
                let space = schedule.part(formula.stateSpace(heads, x: x, dt: dt, b: b, c: c))
                return [formula.output(heads, space(state: &memory), x: x), memory]
            }
        }.flatMap { $0 }
        state.memory = concatenated(parts.map { $0[1] })
        state.tail = formula.convolution.tail(after: xBC, tail: before.tail)
        return concatenated(parts.map { $0[0] }, axis: -1)
    }

    /// Returns the gradients of xBC and dt for a whole sequence. Recomputes the intermediates. dB and dC are summed over the heads of a group.
    ///
    /// - Parameter xBC: `[T, F]`, freed after its last use
    func backward(
        xBC: consuming MLXArray, dt: MLXArray, dO: consuming MLXArray, records: [Range<Int>]? = nil
    ) -> (dXBC: MLXArray, dDt: MLXArray) {
        var inputs = [consume xBC, consume dO]
        let records = records ?? [0..<dt.dim(0)]
        var (dx, dB, dC, dDt) = ([MLXArray](), [MLXArray](), [MLXArray](), [MLXArray]())
        for group in 0..<formula.groups {
            let bc = schedule.part(
                eachRecord(records) {
                    [formula.input(.b(group), inputs[0][$0]), formula.input(.c(group), inputs[0][$0])]
                })
            let ofHeads = schedule.reduce(
                heads(ofGroup: group, dt.dim(0)), MambaGradients(), reading: &inputs
            ) { all, heads, inputs in
                all.add(
                    eachRecord(records) {
                        backward(
                            heads, xBC: inputs[0][$0], dt: dt[$0], b: bc[0][$0], c: bc[1][$0], dO: inputs[1][$0])
                    })
            }
            let d = eachRecord(records) {
                [
                    formula.inputBackward(.b(group), inputs[0][$0], dy: ofHeads.sums[0][$0]),
                    formula.inputBackward(.c(group), inputs[0][$0], dy: ofHeads.sums[1][$0]),
                ]
            }
            inputs = schedule.inputs(inputs, after: d)
            dx += ofHeads.dx
            dDt += ofHeads.dDt
            dB.append(d[0])
            dC.append(d[1])
        }
        inputs = []
        return schedule.part(concatenated(dx + dB + dC, axis: -1), concatenated(dDt, axis: -1))
    }

    private func backward(
        _ heads: Range<Int>, xBC: MLXArray, dt: MLXArray, b: MLXArray, c: MLXArray, dO: MLXArray
    ) -> [MLXArray] {
        let x = schedule.part(formula.byHead(formula.input(.x(heads), xBC)))
        let dO = formula.byHead(dO[0..., formula.features(.x(heads))])
        let d = spaceBackward(schedule.part(formula.stateSpace(heads, x: x, dt: dt, b: b, c: c)), dY: dO)
        return schedule.part(
            formula.headsBackward(
                heads, xBC: xBC, x: x, dt: dt, dO: dO, du: d[0], dLogDecay: d[1].squeezed(axis: -1))) + d[2...]
    }

    /// Returns du `[T, heads, P]`, dκ `[T, heads, 1]`, dB and dC `[T, N]`, for a sequence that began with S = 0.
    private func spaceBackward(_ space: StateSpace, dY: MLXArray) -> [MLXArray] {
        let dY = ChunkDecays.chunked(dY)
        let (inWhole, terms) = {
            let states = schedule.part(space.statesBackward(dY: dY))
            return (states.inWhole, schedule.part(space.termsBackward(states)))
        }()
        return schedule.part(space.inputsBackward(dY: dY, inWhole: inWhole, terms))
    }
}

private struct NetGradients: Arrays {
    var (gradients, carried) = ([[MLXArray]](), [[MLXArray]]())
    var arrays: [MLXArray] { (gradients.last ?? []) + (carried.last ?? []) }
}

private struct MambaGradients: Arrays {
    var (dx, dDt, sums) = ([MLXArray](), [MLXArray](), [MLXArray]())
    var arrays: [MLXArray] { dx.suffix(1) + dDt.suffix(1) + sums }

    mutating func add(_ d: [MLXArray]) {
        dx.append(d[0])
        dDt.append(d[1])
        sums = sums.isEmpty ? Array(d[2...]) : zip(sums, d[2...]).map { $0 + $1 }
    }
}
