import MLX
import MeSPAdapters
import MeSPBundle
import MeSPSentences

package struct NotFinite: Error {
    /// The block and the tensor of the number, or another place, as the beginning of a sentence.
    package let what: Sentence
}

extension BlockwiseModel {
    func notFinite(gradient: MLXArray, _ block: Int) throws -> NotFinite {
        let layout = lora.layouts[block]
        let whole = layout.replacing(in: MLXArray.zeros([layout.count]), trained: gradient)
        let place: Sentence = try lora.firstNotFinite(whole, block).map { "\($0)" } ?? "block \(block)"
        return NotFinite(what: "The gradient of \(place)")
    }

    /// Returns the place of the first number that is not finite in the forward pass of some sequences. Repeats the forward pass to find the place.
    func notFinite(_ examples: [Example]) throws -> NotFinite {
        do {
            try work.repeating {
                for example in examples {
                    _ = try lastOutput(example) { block, parameters in
                        if let name = try lora.firstNotFinite(parameters, block) {
                            throw NotFinite(what: "The parameter \(name)")
                        }
                        return parameters
                    } check: { block, y in
                        guard try isFinite(y) else { throw NotFinite(what: "The output of block \(block)") }
                    }
                }
            }
            return NotFinite(what: "The loss")
        } catch let found as NotFinite {
            return found
        }
    }
}

extension TrainedLoRA {
    func firstNotFinite() throws -> String? {
        for block in trained {
            if let name = try work.repeating({ try firstNotFinite(vectors.read(block), block) }) { return name }
        }
        return nil
    }

    fileprivate func firstNotFinite(_ vector: MLXArray, _ block: Int) throws -> String? {
        for module in layouts[block].modules {
            let matrices = layouts[block].matrices(module, in: vector)
            let all = [("A", matrices.a), ("B", matrices.b)] + (matrices.m.map { [("m", $0)] } ?? [])
            for (name, matrix) in all where try !isFinite(matrix) {
                let layer = AdaptedLayer(name: module.name, modules: [module])
                return AdapterFormat.mlx.name(name, layer, block, of: bundle.architecture)
            }
        }
        return nil
    }
}

func isFinite(_ array: MLXArray) throws -> Bool { try (array * 0).sum().number(Float.self) == 0 }
