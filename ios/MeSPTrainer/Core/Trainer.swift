import Foundation
import MLX

/// How gradients are made.
public enum Method: String, Codable, Sendable, CaseIterable {
    /// The structured backward pass, written out by hand.
    case mesp
    /// The same loop over blocks, with gradients from automatic differentiation.
    case mebp
    /// Zeroth order: two forward passes with a seeded perturbation.
    case mezo
}

/// LoRA training on a bundle, one block at a time. Not for use from several threads at once.
final class Trainer {
    let bundle: ModelBundle
    let layout: LoRALayout
    /// α / rank
    let scale: Float
    /// The parameters: one flat float32 vector `[P]` a block.
    private(set) var lora: [MLXArray]

    /// Called at every block boundary, forward and backward. It may wait (a pause, with the half-done step in memory) or throw
    /// `CancellationError`, which ends the step while that has changed nothing yet, and is not heeded afterwards.
    var atBlock: () throws -> Void = {}
    /// The time that `atBlock` has taken since the start, in seconds.
    private(set) var waitedSeconds = 0.0

    private let function: ImportedFunction
    private let plainFunction: ImportedFunction?
    private let plan: Plan
    private let tile: TileSizes
    /// The block inputs, where the plan has them in a file.
    private let inputFile: ArrayFile?

    /// - Parameters:
    ///   - length: T, tokens in a sequence. `Manifest.checkTrace` must have found it and the rank in the bundle.
    ///   - rank: of the LoRA matrices.
    ///   - seed: of the initial parameters.
    ///   - folder: where the file of block inputs is made, if the plan asks for one.
    init(
        bundle: ModelBundle, method: Method, length: Int, rank: Int, alpha: Float, seed: UInt64, plan: Plan, folder: URL
    ) throws {
        let manifest = bundle.manifest
        self.bundle = bundle
        layout = LoRALayout(architecture: bundle.architecture, rank: rank)
        scale = alpha / Float(rank)
        lora = layout.initial(seed: seed)
        self.plan = plan
        let architecture = bundle.architecture
        tile = TileSizes(
            architecture, group: manifest.quantization.groupSize, length: length, bytes: plan.tileBytes)
        inputFile =
            plan.offload && method != .mezo
            ? try ArrayFile(in: folder, shape: [1, length, architecture.hiddenSize], dtype: bundle.dtype) : nil
        function = try bundle.function(manifest.block.functions, length: length)
        plainFunction =
            method == .mebp ? try bundle.function(manifest.block.plainFunctions, length: length) : nil
    }

    // MARK: - MeSP and MeBP

    /// One forward and backward pass over `tokens` (`[T + 1]`). `update` gets each block's gradient `[P]`, from the last block to the
    /// first, as soon as it is there, and may change that block's parameters.
    ///
    /// - Returns: the mean loss in nats a token. Where it is not finite, nothing was updated.
    func backpropagate(
        _ tokens: ArraySlice<Int32>, method: Method, update: (_ block: Int, _ gradient: MLXArray) throws -> Void
    )
        throws -> Float
    {
        let (inputTokens, targets) = split(tokens)

        // Forward: keep only each block's input, and the intermediates of the last few where the plan has memory for them.
        var x = try embedded(inputTokens)
        var inputs = [MLXArray]()
        var kept = [Int: Intermediates]()
        for block in lora.indices {
            if let inputFile { try inputFile.write(x, at: block) } else { inputs.append(x) }
            let keep = method == .mesp && block >= lora.count - plan.keptBlocks
            (x, kept[block]) = try forward(block, x, lora[block], keep: keep)
        }

        let (loss, dLast) = try head(x, targets: targets, wantsGradient: true)
        guard var d = dLast else { preconditionFailure("the head was asked for a gradient") }
        guard loss.isFinite else { return loss }  // no update can come of it

        // Backward, from the last block: recompute, differentiate, update, free. d goes from dy to dx.
        for block in lora.indices.reversed() {
            try boundary(changed: block < lora.count - 1)
            x = try inputFile?.read(block) ?? inputs.removeLast()
            try withExtendedLifetime(x) {
                let gradient =
                    method == .mebp
                    ? try automaticBackward(block, x, d: &d)
                    : try structuredBackward(block, x, kept.removeValue(forKey: block), d: &d)
                try update(block, gradient)
            }
            Memory.clearCache()
        }
        return loss
    }

    /// Bytes written to the file of block inputs since the start.
    var writtenBytes: Int { inputFile?.written ?? 0 }

    /// One step of stochastic gradient descent: `lora ← lora − η ∂loss/∂lora`, block by block within the backward pass.
    func step(_ tokens: ArraySlice<Int32>, method: Method, learningRate: Float) throws -> Float {
        try backpropagate(tokens, method: method) { block, gradient in
            lora[block] = lora[block] - learningRate * gradient
            eval(lora[block])
        }
    }

    /// The block's output `[1, T, hidden]` and, where they are to be kept, its intermediates; evaluated.
    private func forward(_ block: Int, _ x: MLXArray, _ lora: MLXArray, keep: Bool = false) throws
        -> (y: MLXArray, kept: Intermediates?)
    {
        try boundary()
        defer { Memory.clearCache() }
        return try bundle.withBlock(block) { weights in
            guard keep else {
                // Without a reference to the others, each goes as soon as y no longer needs it.
                let y = try call(function, x, lora, weights.words)[0]
                eval(y)
                return (y, nil)
            }
            let out = try call(function, x, lora, weights.words)
            eval([out[0]] + out[2...8])
            return (
                out[0],
                Intermediates(
                    q: out[2], k: out[3], v: out[4], attnOut: out[5], xMid: out[6], gate: out[7], up: out[8])
            )
        }
    }

    /// MeSP: the block's forward pass again up to x_mid, unless it was kept, then the derivatives by hand.
    private func structuredBackward(
        _ block: Int, _ x: MLXArray, _ kept: Intermediates?, d: inout MLXArray
    ) throws -> MLXArray {
        try bundle.withBlock(block) { weights in
            let intermediates = try kept ?? recompute(x, lora[block], weights.words)
            let backward = BlockBackward(
                architecture: bundle.architecture, weights: weights, lora: lora[block], layout: layout, scale: scale,
                tile: tile)
            return backward(x: x, consume intermediates, d: &d, wantsInput: block > 0)
        }
    }

    /// The outputs that nobody evaluates cost nothing, but hold the graph: they end with this function.
    private func recompute(_ x: MLXArray, _ lora: MLXArray, _ words: MLXArray) throws -> Intermediates {
        let out = try call(function, x, lora, words)
        eval(out[2...6])
        return Intermediates(q: out[2], k: out[3], v: out[4], attnOut: out[5], xMid: out[6], gate: nil, up: nil)
    }

    /// MeBP: automatic differentiation of the block in plain operations, from its input.
    private func automaticBackward(_ block: Int, _ x: MLXArray, d: inout MLXArray) throws -> MLXArray {
        guard let plainFunction else { preconditionFailure("the trainer was made for another method") }
        return try bundle.withBlock(block) { weights in
            let (_, gradients) = vjp(
                { [scale] primals in
                    let arguments: KeyValuePairs<String, MLXArray> = [
                        "": primals[0], "": primals[1], "": MLXArray(scale), "": weights.words,
                    ]
                    // The call fails only for shapes that the file has no trace for; `Manifest.checkTrace` has found these.
                    return (try? plainFunction.dynamicallyCall(withKeywordArguments: arguments)[0]).map { [$0] } ?? []
                }, primals: [x, lora[block]], cotangents: [d])
            eval(gradients)
            d = gradients[0]
            return gradients[1]
        }
    }

    // MARK: - MeZO

    /// One step of MeZO: with z ~ N(0, 1) from the seed, `g = (L(lora + ε z) − L(lora − ε z)) / 2ε` and `lora ← lora − η g z`. z is drawn
    /// again, block by block, each time it is needed.
    ///
    /// - Returns: the mean of the two losses. Where it is not finite, nothing was updated.
    func zerothOrderStep(_ tokens: ArraySlice<Int32>, epsilon: Float, learningRate: Float, seed: UInt64) throws -> Float
    {
        let keys = MLXRandom.split(key: MLXRandom.key(seed), into: lora.count)
        func z(_ block: Int) -> MLXArray { MLXRandom.normal([layout.count], key: keys[block]) }

        let plus = try loss(tokens) { lora[$0] + epsilon * z($0) }
        let minus = try loss(tokens) { lora[$0] - epsilon * z($0) }
        let slope = (plus - minus) / (2 * epsilon)
        guard slope.isFinite else { return slope }  // no update can come of it
        for block in lora.indices {
            try boundary(changed: block > 0)
            lora[block] = lora[block] - learningRate * slope * z(block)
            eval(lora[block])
        }
        return (plus + minus) / 2
    }

    // MARK: - Loss

    /// The mean loss of `tokens` (`[T + 1]`) in nats a token.
    func loss(_ tokens: ArraySlice<Int32>) throws -> Float {
        try loss(tokens) { lora[$0] }
    }

    private func loss(_ tokens: ArraySlice<Int32>, parameters: (_ block: Int) -> MLXArray) throws -> Float {
        let (inputTokens, targets) = split(tokens)
        var x = try embedded(inputTokens)
        for block in lora.indices {
            x = try forward(block, x, parameters(block)).y
        }
        return try head(x, targets: targets, wantsGradient: false).loss
    }

    /// - Parameter changed: whether the step has changed parameters, and so must be finished.
    private func boundary(changed: Bool = false) throws {
        let start = Date.now
        defer { waitedSeconds += Date.now.timeIntervalSince(start) }
        do { try atBlock() } catch is CancellationError where changed {}
    }

    private func embedded(_ tokens: MLXArray) throws -> MLXArray {
        try bundle.withEmbedding { weights in
            let x = embed(tokens, weights)
            eval(x)
            return x
        }
    }

    private func head(_ y: MLXArray, targets: MLXArray, wantsGradient: Bool) throws -> (loss: Float, dy: MLXArray?) {
        try boundary()
        let (loss, dy) = try bundle.withHead { weights in
            let head = Head(weights: weights, eps: bundle.architecture.rmsNormEps, tile: tile.vocabulary)
            return head(y, targets: targets, wantsGradient: wantsGradient)
        }
        Memory.clearCache()
        return (loss.item(Float.self), dy)
    }

    private func split(_ tokens: ArraySlice<Int32>) -> (inputs: MLXArray, targets: MLXArray) {
        (MLXArray(Array(tokens.dropLast())), MLXArray(Array(tokens.dropFirst())))
    }

    private func call(_ function: ImportedFunction, _ x: MLXArray, _ lora: MLXArray, _ words: MLXArray) throws
        -> [MLXArray]
    {
        try function.dynamicallyCall(withKeywordArguments: ["": x, "": lora, "": MLXArray(scale), "": words])
    }

    /// Replaces the parameters: one flat vector `[P]` a block.
    func load(_ parameters: [MLXArray]) {
        precondition(parameters.map(\.shape) == lora.map(\.shape))
        lora = parameters
    }
}
