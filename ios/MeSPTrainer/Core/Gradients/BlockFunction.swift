import MLX

/// The forward pass of a block, `f(x, lora, scale, weights)`, from a bundle's file.
final class BlockFunction {
    /// What a caller evaluates of what the file's function returns: y, mixer_in, m₁, m₂, m₃, mixed, x_mid, gate, up and, with
    /// post-norms, mixer_out and mlp_out. See `Intermediates`.
    enum Outputs {
        case y
        /// What the backward pass reads, but for gate and up: m₁, m₂, m₃, mixed, x_mid, and mixer_out and mlp_out.
        case intermediates
        case all

        fileprivate func of(_ outputs: [MLXArray]) -> [MLXArray] {
            switch self {
            case .y: Array(outputs.prefix(1))
            case .intermediates: Array(outputs[2...6] + outputs.dropFirst(9))
            case .all: outputs
            }
        }
    }

    private let function: ImportedFunction
    /// Whether MLX fuses the operations between products into kernels of their own, as a GPU wants it. What is not asked for would
    /// keep some apart.
    private let isFused: Bool
    private var fused = [Outputs: @Sendable ([MLXArray]) -> [MLXArray]]()
    private var error: (any Error)?
    /// The outputs for which a GPU has compiled the kernels, which are fused by what is asked for.
    private var compiled = Set<Outputs>()

    init(_ function: ImportedFunction, isFused: Bool) {
        (self.function, self.isFused) = (function, isFused)
    }

    /// The asked-for outputs, not evaluated. Others are not held: each array goes as soon as these no longer need it.
    func callAsFunction(_ outputs: Outputs, _ arguments: [MLXArray]) throws -> [MLXArray] {
        guard isFused else { return outputs.of(try call(arguments)) }
        error = nil
        let result = kernels(outputs)(arguments)
        // Where an argument could not be made there is no result.
        try MLXErrors.check()
        if let error {
            // MLX would call what it traced again, which is nothing.
            fused[outputs] = nil
            throw error
        }
        return result
    }

    /// Has a GPU compile the kernels for these outputs, unless it has: evaluates one after the other, with `pause` between them. Of y alone,
    /// what it shares with the intermediates comes first.
    func compileKernels(_ outputs: Outputs, _ arguments: [MLXArray], pause: () -> Void) throws {
        for outputs in outputs == .y ? [.intermediates, .y] : [outputs] where compiled.insert(outputs).inserted {
            for output in try self(outputs, arguments) {
                eval(output)
                pause()
            }
        }
    }

    private func call(_ a: [MLXArray]) throws -> [MLXArray] {
        try function.dynamicallyCall(withKeywordArguments: ["": a[0], "": a[1], "": a[2], "": a[3]])
    }

    private func kernels(_ outputs: Outputs) -> @Sendable ([MLXArray]) -> [MLXArray] {
        if let made = fused[outputs] { return made }
        let made = compile { [unowned self] arguments in
            do {
                return outputs.of(try call(arguments))
            } catch {
                self.error = error
                return []
            }
        }
        fused[outputs] = made
        return made
    }
}
