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

    /// The array called `name`, in its shape and dtype, or nil if there is none; of stacked matrices that with this number.
    func array(_ name: String, _ number: Int? = nil) -> MLXArray? {
        let key = number.map { "\(name) \($0)" } ?? name
        if let known = views?.arrays[key] { return known }
        guard let array = arrays.first(where: { $0.name == name }) else { return nil }
        let flat = words[array.range(number)]
        let shape = Array(array.shape.dropFirst(number == nil ? 0 : 1))
        let view = flat.view(dtype: array.dtype.dtype)[0..<shape.reduce(1, *)].reshaped(shape)
        views?.arrays[key] = view
        return view
    }

    /// The array called `name`. `ModelBundle` has checked that it is there.
    subscript(name: String, number: Int? = nil) -> MLXArray {
        guard let array = array(name, number) else { preconditionFailure("no array \(name) in the layout") }
        return array
    }

    /// The quantized matrix `[rows, inputs]` whose arrays' names start with `prefix`; of stacked ones that with this number.
    func matrix(_ prefix: String, _ number: Int? = nil, inputs: Int) -> QuantizedMatrix {
        let (weight, scales) = (self[prefix + "weight", number], self[prefix + "scales", number])
        let biases = array(prefix + "biases", number)
        guard
            let format = QuantizationFormat(
                inputs: inputs, words: weight.dim(1), groups: scales.dim(1), hasBiases: biases != nil)
        else { preconditionFailure("no format for \(prefix)") }
        return QuantizedMatrix(
            weight: weight, scales: scales, biases: biases, format: format, backend: backend)
    }
}
