import MLX

/// Typed views of the arrays in a weight file, by name. Views do not copy data.
package struct PackedWeights {
    package let words: MLXArray
    package let arrays: [Manifest.PackedArray]
    package let backend: Backend
    package var views: Views?
    var unmap: (() -> Void)?

    package final class Views {
        fileprivate var arrays = [String: MLXArray]()

        package init() {}
    }

    /// Ends the use of the file, which may then be unmapped. Arrays that are used later must be evaluated before.
    ///
    /// Until then the reference to `words` prevents MLX from donating the mapped buffer and writing a result into it.
    package func close() { withExtendedLifetime(words) { unmap?() } }

    package var onCPU: PackedWeights { PackedWeights(words: words, arrays: arrays, backend: .cpu) }

    package func array(_ name: String, _ number: Int? = nil) -> MLXArray? {
        let key = number.map { "\(name) \($0)" } ?? name
        if let known = views?.arrays[key] { return known }
        guard let array = arrays.first(where: { $0.name == name }) else { return nil }
        let flat = words[array.range(number)]
        let shape = Array(array.shape.dropFirst(number == nil ? 0 : 1))
        let view = flat.view(dtype: array.dtype.dtype)[0..<shape.reduce(1, *)].reshaped(shape)
        views?.arrays[key] = view
        return view
    }

    package subscript(name: String, number: Int? = nil) -> MLXArray {
        guard let array = array(name, number) else { preconditionFailure("no array \(name) in the layout") }
        return array
    }
}

package struct QuantizationFormat {
    package let bits: Int
    package let groupSize: Int
    package let mode: QuantizationMode

    /// Derives the format. Returns nil if MLX has no such format.
    package init?(inputs: Int, words: Int, groups: Int, hasBiases: Bool) {
        guard words > 0, groups > 0, words * 32 % inputs == 0, inputs % groups == 0 else { return nil }
        (bits, groupSize) = (words * 32 / inputs, inputs / groups)
        switch (hasBiases, groupSize, bits) {
        case (true, _, _):
            guard [32, 64, 128].contains(groupSize), [2, 3, 4, 5, 6, 8].contains(bits) else { return nil }
            mode = .affine
        case (false, 16, 4): mode = .nvfp4
        case (false, 32, 4): mode = .mxfp4
        case (false, 32, 8): mode = .mxfp8
        default: return nil
        }
    }
}
