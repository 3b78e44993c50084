import MLX
import MeSPAdapters
import MeSPBundle

protocol Arrays {
    var arrays: [MLXArray] { get }
}

extension MLXArray: Arrays { var arrays: [MLXArray] { [self] } }
extension Optional: Arrays where Wrapped: Arrays { var arrays: [MLXArray] { self?.arrays ?? [] } }
extension Array: Arrays where Element: Arrays { var arrays: [MLXArray] { flatMap(\.arrays) } }
extension LoRAGradients: Arrays {
    var arrays: [MLXArray] { [a, b, m].flatMap(\.values) + experts.values.flatMap(\.arrays) }
}

/// Functions that split a computation into parts, so that a part's temporary arrays can be freed before the next part.
///
/// In a backward pass, a CPU evaluates each part. A GPU evaluates parts only with a `pause`, because it would be idle between evaluations. Instead,
/// `reduce` makes each part depend on the part before, so that `Memory.memoryLimit` bounds the temporary arrays.
extension Schedule {
    @discardableResult func part<each R: Arrays>(_ results: repeat each R) -> (repeat each R) {
        if evaluatesParts || pause != nil { submit(allArrays(repeat each results)) }
        pause?()
        return (repeat each results)
    }

    /// Ends a phase of a block, such as its mixer or its MLP, and returns its results.
    @discardableResult func phase<each R: Arrays>(_ results: repeat each R) -> (repeat each R) {
        if !evaluatesParts, pause == nil, !isLazy { submit(allArrays(repeat each results)) }
        return part(repeat each results)
    }

    @discardableResult func stage<each R: Arrays>(_ results: repeat each R) -> (repeat each R) {
        evaluatesStages ? phase(repeat each results) : part(repeat each results)
    }

    /// Updates a state by each of the parts in order.
    ///
    /// - Parameters:
    ///   - state: the state before the first part; consumed, so that its arrays are freed when a part replaces them
    func reduce<P, S: Arrays>(
        _ parts: [P], _ state: consuming S, reading inputs: inout [MLXArray],
        _ next: (_ state: inout S, _ part: P, _ inputs: [MLXArray]) throws -> Void
    ) rethrows -> S {
        for part in parts {
            try next(&state, part, inputs)
            if evaluatesTiles, !evaluatesParts, parts.count > 1 { submit(state.arrays) }
            inputs = self.inputs(inputs, after: state.arrays)
        }
        return state
    }

    /// Returns the inputs for the next part. On a GPU without a `pause` they depend on the arrays `done`, so that the next part is computed after
    /// `done`. Otherwise this function ends the part with the results `done`.
    func inputs(_ inputs: [MLXArray], after done: [MLXArray]) -> [MLXArray] {
        guard processor.chainsParts, pause == nil, !inputs.isEmpty else {
            part(done)
            return inputs
        }
        // `depends` must run on the stream of `done`. It runs on the stream of its first array unless that array is already evaluated. So an array of
        // `done` comes first.
        let (first, others) = (Array(done.prefix(1)), Array(done.dropFirst()))
        return Array(depends(inputs: first + inputs, dependencies: others).dropFirst(first.count))
    }

    /// Returns the result of `body` for each piece. If there are several pieces, each result is evaluated, on a GPU too.
    func each<R: Arrays>(of count: Int, size: Int, _ body: (Range<Int>) throws -> R) rethrows -> [R] {
        try each(tiles(of: count, size: size), body)
    }

    func each<R: Arrays>(_ pieces: [Range<Int>], _ body: (Range<Int>) throws -> R) rethrows -> [R] {
        try pieces.map {
            let result = try body($0)
            if pieces.count > 1 { submit(result.arrays) }
            return result
        }
    }

    /// Returns the results of `body` for successive ranges of the rows of x `[n, …]`. `body` must process each row independently.
    func rows<R: Arrays>(of x: MLXArray, _ body: (Range<Int>) -> R) -> [R] {
        tiles(of: x.dim(0), size: rowsAtOnce(of: x)).map { part(body($0)) }
    }

    /// Replaces the rows of x `[T, …]` by the results of `body`, some tokens at a time. `body` must process each token independently.
    func replaceByTokens(_ x: inout MLXArray, _ body: (_ tokens: Range<Int>, _ rows: MLXArray) -> MLXArray) {
        for tokens in tiles(of: x.dim(0), size: mlpTokens) {
            let rows = body(tokens, x[tokens])
            if tokens.count < x.dim(0) { eval(rows) }
            replace(tokens, of: &x, by: rows)
            // The freed buffers are too small to be reused for arrays of the whole sequence.
            if tokens.count < x.dim(0) { Memory.clearCache() }
        }
    }
}

private func allArrays<each R: Arrays>(_ results: repeat each R) -> [MLXArray] {
    var all = [MLXArray]()
    for result in repeat each results { all += result.arrays }
    return all
}

/// Evaluates arrays, as MLX's function does, unless the piece of work was interrupted (`MLXErrors.interrupt`).
func eval(_ arrays: [MLXArray]) {
    if !MLXErrors.isInterrupted { MLX.eval(arrays) }
}

func eval(_ arrays: MLXArray...) { eval(arrays) }

/// Starts to compute arrays. On a CPU it returns before they are computed, so that the graph of the next part is built meanwhile. On a GPU it waits.
/// Code that unmaps or trims memory must call `eval` first.
func submit(_ arrays: [MLXArray]) {
    guard Device.isCPU, !MLXErrors.isInterrupted else { return eval(arrays) }
    Stream.cpu.synchronize()
    asyncEval(arrays)
}

/// The other rows are not copied if the array has no other reference.
func replace(_ rows: Range<Int>, of array: inout MLXArray, by part: MLXArray) {
    guard rows.count < array.dim(0) else {
        array = part
        return
    }
    array = array[.ellipsis]  // a new object, as other code may refer to the old one
    array[rows] = part
    // The assignment would copy the array while unfinished work reads it.
    if Device.isCPU, !MLXErrors.isInterrupted { Stream.cpu.synchronize() }
    eval(array)
}
