import MLX
import MeSPBundle

/// The model's head on mapped weights: losses and their gradients from the last block's output y `[1, T, hidden]`.
package struct LossHead {
    let bundle: ModelBundle
    let work: StepWork

    func loss(_ y: MLXArray, _ example: Example) throws -> Float {
        try run(y) { head in
            try head.loss(
                y, targets: Array(example.targets), counted: example.counted, atBoundary: work.boundary
            ).number(Float.self)
        }
    }

    /// Returns the sum of the losses at the positions `Example.counted`, in nats, and dy `[1, T, hidden]`, which is `scale` times the gradient of the
    /// sum with respect to y.
    package func lossAndGradient(_ y: MLXArray, _ example: Example, scale: Float) throws -> (loss: Float, dy: MLXArray)
    {
        try run(y) { head in
            let (loss, dy) = try head.lossAndGradient(
                y, targets: Array(example.targets), counted: example.counted, scale: scale, atBoundary: work.boundary)
            eval(loss, dy)
            return (try loss.number(Float.self), dy)
        }
    }

    /// Returns the sum of KL(p ‖ q) at the positions `Example.counted`, in nats, of the words' probabilities p after y and q after `other`.
    func divergence(_ y: MLXArray, _ other: MLXArray, _ example: Example) throws -> Double {
        let counted = MLXArray.of(example.counted.map { Int32($0) })
        return try run(y) { head in
            let terms = try head.divergences(y[0][counted], other[0][counted], atBoundary: work.boundary)
            return try terms.numbers(Float.self).reduce(0) { $0 + Double($1) }
        }
    }

    private func run<R>(_ y: MLXArray, _ body: (CrossEntropyHead) throws -> R) throws -> R {
        try work.boundary()
        defer { work.freeCache() }
        return try bundle.withHead { weights in
            let start = work.now
            defer { work.add(since: start, to: \.loss) }
            // The loss at the end confirms the results.
            return try work.repeating(isBounded: true, confirms: false) {
                try body(
                    CrossEntropyHead(
                        weights: weights, architecture: bundle.architecture,
                        schedule: work.schedule(length: y.dim(1))))
            }
        }
    }
}
