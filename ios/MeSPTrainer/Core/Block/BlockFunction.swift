import MLX
import MeSPAdapters
import MeSPBundle

/// The block function `f(x, lora, scale, weights)` from a file of the bundle. It returns y, mixer_in, the arrays of `MixerIntermediates`, x_mid,
/// gate, up and, with post-norms, mixer_out and mlp_out.
///
/// Further arguments are `Block.sideInputs`.
package final class BlockFunction {
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
    private let isFused: Bool
    private var fused = [Selection: @Sendable ([MLXArray]) -> [MLXArray]]()
    private var error: (any Error)?
    private var compiled = Set<Selection>()

    init(_ function: ImportedFunction, isFused: Bool) {
        (self.function, self.isFused) = (function, isFused)
    }

    /// - Parameter block: has records only if this is the function for packed records
    package func callAsFunction(_ block: Block) -> some BlockForward {
        Call(
            function: self, mixer: block.weights.shape.mixer,
            parameters: [block.layout.whole(block.lora), MLXArray(block.scale), block.weights.packed.words]
                + block.sideInputs, pause: block.schedule.pause)
    }

    fileprivate func outputs(_ selection: Selection, _ arguments: [MLXArray]) throws -> [MLXArray] {
        guard isFused else { return selection.of(try call(arguments)) }
        error = nil
        let result = kernels(selection)(arguments)
        do {
            try MLXErrors.check()
            if let error { throw error }
        } catch {
            // A trace that failed is removed, so that MLX traces the function again.
            fused[selection] = nil
            throw error
        }
        return result
    }

    /// Makes a GPU compile the kernels for these outputs, once. For y, the intermediates are evaluated first, as they share kernels with y.
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
        // A dictionary literal is the only way to pass several arguments with an empty keyword.
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

private struct Call: BlockForward {
    let function: BlockFunction
    let mixer: Mixer
    /// The arguments after x: lora `[P]`, scale, the words of the block's weights, and `Block.sideInputs`.
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
    fileprivate var unbatched: MLXArray { squeezed(axis: 0) }
}
