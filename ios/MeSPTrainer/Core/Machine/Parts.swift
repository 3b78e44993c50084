import MLX
import MeSPAdapters

/// Arrays that a part of a formula leaves.
protocol Arrays {
    var arrays: [MLXArray] { get }
}

extension MLXArray: Arrays { var arrays: [MLXArray] { [self] } }
extension Optional: Arrays where Wrapped: Arrays { var arrays: [MLXArray] { self?.arrays ?? [] } }
extension Array: Arrays where Element: Arrays { var arrays: [MLXArray] { flatMap(\.arrays) } }
extension LoRAGradients: Arrays {
    var arrays: [MLXArray] { Array(a.values) + Array(b.values) + experts.values.flatMap(\.arrays) }
}

/// How a formula is computed by parts. A part leaves its results; the memory of what else it made serves the next part.
///
/// On a CPU each part is evaluated. On a GPU the next part depends on it, so that MLX encodes one after the other, and nobody waits for a
/// GPU that would then have nothing to do; `Memory.memoryLimit` bounds what lives until the GPU has got so far.
extension Machine {
    /// Returns the results of a part.
    @discardableResult func part<each R: Arrays>(_ results: repeat each R) -> (repeat each R) {
        if evaluatesParts || pause != nil {
            var all = [MLXArray]()
            for result in repeat each results { all += result.arrays }
            submit(all)
        }
        pause?()
        return (repeat each results)
    }

    /// Returns the results of a phase of a block, such as its mixer or its MLP: evaluated on a GPU too, so that of a phase's arrays as long as
    /// the sequence, a dozen, only these are there in the next.
    @discardableResult func phase<each R: Arrays>(_ results: repeat each R) -> (repeat each R) {
        if !evaluatesParts, pause == nil {
            var all = [MLXArray]()
            for result in repeat each results { all += result.arrays }
            submit(all)
        }
        return part(repeat each results)
    }

    /// Returns the results of a stage of a phase, which is a phase where a sequence is long and else a part.
    @discardableResult func stage<each R: Arrays>(_ results: repeat each R) -> (repeat each R) {
        evaluatesStages ? phase(repeat each results) : part(repeat each results)
    }

    /// Takes some state through parts, one after the other.
    ///
    /// - Parameters:
    ///   - inputs: that every part reads.
    ///   - next: makes the state behind a part of that before it, from the inputs.
    /// - Returns: the state behind the last part.
    func reduce<P, S: Arrays>(
        _ parts: [P], _ state: S, reading inputs: inout [MLXArray],
        _ next: (_ state: inout S, _ part: P, _ inputs: [MLXArray]) throws -> Void
    ) rethrows -> S {
        var state = state
        for part in parts {
            try next(&state, part, inputs)
            if evaluatesTiles, !evaluatesParts, parts.count > 1 { submit(state.arrays) }
            inputs = self.inputs(inputs, after: state.arrays)
        }
        return state
    }

    /// The inputs of the next part, available only after `done`.
    func inputs(_ inputs: [MLXArray], after done: [MLXArray]) -> [MLXArray] {
        guard processor.chainsParts, pause == nil, !inputs.isEmpty else {
            part(done)
            return inputs
        }
        // MLX takes the stream of the first array, and C++'s own where that was evaluated before (MLX 0.32.2, ops.cpp:6408).
        let (first, others) = (Array(done.prefix(1)), Array(done.dropFirst()))
        return Array(depends(inputs: first + inputs, dependencies: others).dropFirst(first.count))
    }

    /// Returns what `body` makes of each piece of `0..<count`. Several are evaluated one after the other, on a GPU too.
    func each<R: Arrays>(of count: Int, size: Int, _ body: (Range<Int>) throws -> R) rethrows -> [R] {
        let pieces = tiles(of: count, size: size)
        return try pieces.map {
            let result = try body($0)
            if pieces.count > 1 { submit(result.arrays) }
            return result
        }
    }

    /// Returns what `body` makes of some rows of x `[n, …]` after the other, whose arithmetic needs no other rows.
    func rows<R: Arrays>(of x: MLXArray, _ body: (Range<Int>) -> R) -> [R] {
        tiles(of: x.dim(0), size: rowsAtOnce(of: x)).map { part(body($0)) }
    }

    /// Evaluates what a block leaves; of one token of each text where weights stay mapped, on a CPU while the graph of the next block is made,
    /// and on a GPU with the token: a round trip takes longer than a block's kernels.
    ///
    /// - Returns: whether nothing has waited for it.
    func leave(_ results: [MLXArray], isDeferred: Bool) -> Bool {
        guard isDeferred, pause == nil else {
            eval(results)
            pause?()
            return false
        }
        if !processor.chainsParts { asyncEval(results) }
        return true
    }

    /// Counts the multiplications of a part of the head. Where there would be too many since the last boundary, evaluates what the parts
    /// before left, and calls `atBoundary`.
    func work(
        _ multiplications: Int, since work: inout Int, leaving results: some Arrays, _ atBoundary: () throws -> Void
    ) rethrows {
        if work > 0, work + multiplications > Self.mostWork ?? processor.workBetweenBoundaries {
            eval(results.arrays)
            try atBoundary()
            work = 0
        }
        work += multiplications
    }

    /// Puts what `body` makes of some tokens' rows of x `[T, …]` in their place, which needs no other tokens.
    func replaceByTokens(_ x: inout MLXArray, _ body: (_ tokens: Range<Int>, _ rows: MLXArray) -> MLXArray) {
        for tokens in tiles(of: x.dim(0), size: mlpTokens) {
            replace(tokens, of: &x, by: body(tokens, x[tokens]))
            // What is freed here is in the way of arrays of the whole sequence, which take no part of it.
            if tokens.count < x.dim(0) { Memory.clearCache() }
        }
    }
}

/// Computes what reads some rows of a mapped file, evaluated: by the CPU, as for a kernel Metal would hold all of the file in memory.
func readRows<R: Arrays>(_ body: () -> R) -> R {
    Device.withDefaultDevice(.cpu) {
        let rows = body()
        eval(rows.arrays)
        return rows
    }
}

/// Evaluates arrays. On a CPU it waits only for what was submitted before: the graph of the next piece of work is made while these are
/// computed, in no more memory, as that is taken when the next piece is submitted. Whoever unmaps or trims memory evaluates first.
func submit(_ arrays: [MLXArray]) {
    guard Device.isCPU else { return eval(arrays) }
    Stream.cpu.synchronize()
    asyncEval(arrays)
}

/// Puts `part` in the place of some rows, evaluated; without a copy of the others where nobody else has the array.
func replace(_ rows: Range<Int>, of array: inout MLXArray, by part: MLXArray) {
    guard rows.count < array.dim(0) else {
        array = part
        return
    }
    array = array[.ellipsis]  // an object of its own
    array[rows] = part
    // Of an array that unfinished work reads, this would be a copy.
    if Device.isCPU { Stream.cpu.synchronize() }
    eval(array)
}
