import MLX
import MeSPAdapters
import MeSPBundle

/// The function of a bundle's file, `f(x, lora, scale, weights)`, which returns y, mixer_in, the arrays of
/// `MixerIntermediates`, x_mid, gate, up and, with post-norms, mixer_out and mlp_out.
///
/// More arguments follow: the arrays of `SideInputs`, and for packed records the position at which each token's record begins.
package final class BlockFunction {
    /// Which of these a caller evaluates.
    fileprivate enum Selection {
        case output, intermediates, all

        func of(_ outputs: [MLXArray]) -> [MLXArray] {
            switch self {
            case .output: Array(outputs.prefix(1))
            case .intermediates: Array(outputs[2...6] + outputs.dropFirst(9))
            case .all: outputs
            }
        }
    }

    private let function: ImportedFunction
    /// Whether MLX fuses the operations between products into kernels, which a GPU needs. Outputs that nobody asked for would keep some
    /// operations apart.
    private let isFused: Bool
    private var fused = [Selection: @Sendable ([MLXArray]) -> [MLXArray]]()
    private var error: (any Error)?
    /// The selections for which a GPU has compiled the kernels, which are fused by what is asked for.
    private var compiled = Set<Selection>()

    init(_ function: ImportedFunction, isFused: Bool) {
        (self.function, self.isFused) = (function, isFused)
    }

    /// The block of a call.
    ///
    /// - Parameters:
    ///   - call: with records only for the function of packed ones
    ///   - layout: of the call's parameters
    ///   - pause: for a GPU that has not compiled the kernels: called after each output, which is evaluated first.
    package func callAsFunction(
        _ call: BlockCall, _ layout: LoRALayout, scale: Float, pause: (() -> Void)? = nil
    ) -> some BlockForward {
        Call(
            function: self, mixer: call.weights.shape.mixer,
            parameters: [layout.whole(call.lora), MLXArray(scale), call.weights.packed.words] + call.side.arrays,
            pause: pause)
    }

    /// The selected outputs, not evaluated. Others are not held: each array goes as soon as these no longer need it.
    fileprivate func outputs(_ selection: Selection, _ arguments: [MLXArray]) throws -> [MLXArray] {
        guard isFused else { return selection.of(try call(arguments)) }
        error = nil
        let result = kernels(selection)(arguments)
        // Where an argument could not be made there is no result.
        try MLXErrors.check()
        if let error {
            // MLX would call what it traced again, which is nothing.
            fused[selection] = nil
            throw error
        }
        return result
    }

    /// Has a GPU compile the kernels for these outputs, unless it has: evaluates one after the other, with `pause` between them. Of y alone,
    /// what it shares with the intermediates comes first.
    fileprivate func compileKernels(_ selection: Selection, _ arguments: [MLXArray], pause: () -> Void) throws {
        for selection in selection == .output ? [.intermediates, .output] : [selection]
        where compiled.insert(selection).inserted {
            for output in try outputs(selection, arguments) {
                eval(output)
                pause()
            }
        }
    }

    private func call(_ a: [MLXArray]) throws -> [MLXArray] {
        // The arguments of a call can only be written out.
        switch a.count {
        case 4: try function.dynamicallyCall(withKeywordArguments: ["": a[0], "": a[1], "": a[2], "": a[3]])
        case 5: try function.dynamicallyCall(withKeywordArguments: ["": a[0], "": a[1], "": a[2], "": a[3], "": a[4]])
        case 6:
            try function.dynamicallyCall(
                withKeywordArguments: ["": a[0], "": a[1], "": a[2], "": a[3], "": a[4], "": a[5]])
        case 7:
            try function.dynamicallyCall(
                withKeywordArguments: ["": a[0], "": a[1], "": a[2], "": a[3], "": a[4], "": a[5], "": a[6]])
        default:
            try function.dynamicallyCall(
                withKeywordArguments: [
                    "": a[0], "": a[1], "": a[2], "": a[3], "": a[4], "": a[5], "": a[6], "": a[7],
                ])
        }
    }

    private func kernels(_ selection: Selection) -> @Sendable ([MLXArray]) -> [MLXArray] {
        if let made = fused[selection] { return made }
        let made = compile { [unowned self] arguments in
            do {
                return selection.of(try call(arguments))
            } catch {
                self.error = error
                return []
            }
        }
        fused[selection] = made
        return made
    }
}

/// A block function with parameters and weights.
private struct Call: BlockForward {
    let function: BlockFunction
    let mixer: Mixer
    /// lora `[P]`, scale, the words of the block's weights and, of packed records, where each token's begins `[T]`.
    let parameters: [MLXArray]
    let pause: (() -> Void)?

    func output(_ x: MLXArray) throws -> MLXArray { try list(.output, x)[0] }

    func intermediates(_ x: MLXArray) throws -> Intermediates {
        let a = try list(.intermediates, x).map(\.unbatched)
        return Intermediates(
            mixer: MixerIntermediates(mixer, a[0..<4]), xMid: a[4], mixerOut: a.count > 5 ? a[5] : nil,
            mlpOut: a.count > 5 ? a[6] : nil)
    }

    func outputs(_ x: MLXArray) throws -> BlockOutputs {
        let all = try list(.all, x)
        let a = all.map(\.unbatched)
        return BlockOutputs(
            y: all[0], mixerIn: a[1],
            intermediates: Intermediates(
                mixer: MixerIntermediates(mixer, a[2..<6]), xMid: a[6], gate: a[7], up: a[8],
                mixerOut: a.count > 9 ? a[9] : nil, mlpOut: a.count > 9 ? a[10] : nil))
    }

    private func list(_ selection: BlockFunction.Selection, _ x: MLXArray) throws -> [MLXArray] {
        let arguments = [x] + parameters
        if let pause { try function.compileKernels(selection, arguments, pause: pause) }
        return try function.outputs(selection, arguments)
    }
}

extension MLXArray {
    /// Without the axis of the batch: a view, where an index would copy.
    fileprivate var unbatched: MLXArray { squeezed(axis: 0) }
}
