import MLX

/// Typed views into a file of words, by name. No view copies.
package struct PackedWeights {
    let words: MLXArray
    let arrays: [Manifest.PackedArray]
    let backend: Backend
    /// The views made so far, where they are kept.
    var views: Views?

    /// Views by name, for who uses the same weights many times: making one is four operations.
    final class Views { fileprivate var arrays = [String: MLXArray]() }

    /// The same weights for the formulas of a CPU.
    package var onCPU: PackedWeights { PackedWeights(words: words, arrays: arrays, backend: .cpu) }

    /// The array called `name`, in its shape and dtype, or nil if there is none.
    func array(_ name: String) -> MLXArray? {
        if let known = views?.arrays[name] { return known }
        guard let array = arrays.first(where: { $0.name == name }) else { return nil }
        let flat = words[array.offset..<(array.offset + array.words)]
        let count = array.shape.reduce(1, *)
        let view = flat.view(dtype: array.dtype.dtype)[0..<count].reshaped(array.shape)
        views?.arrays[name] = view
        return view
    }

    /// The array called `name`. `ModelBundle` has checked that it is there.
    subscript(name: String) -> MLXArray {
        guard let array = array(name) else { preconditionFailure("no array \(name) in the layout") }
        return array
    }

    /// The quantized matrix `[rows, inputs]` whose arrays' names start with `prefix`.
    func matrix(_ prefix: String, inputs: Int) -> QuantizedMatrix {
        let (weight, scales, biases) = (self[prefix + "weight"], self[prefix + "scales"], array(prefix + "biases"))
        guard
            let format = QuantizationFormat(
                inputs: inputs, words: weight.dim(1), groups: scales.dim(1), hasBiases: biases != nil)
        else { preconditionFailure("no format for \(prefix)") }
        return QuantizedMatrix(
            weight: weight, scales: scales, biases: biases, format: format, backend: backend)
    }
}
