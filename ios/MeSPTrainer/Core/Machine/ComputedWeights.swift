import MLX
import MeSPBundle

extension ModelBundle {
    package var processor: Processor { backend.processor }

    /// What `body` makes of the weights of a file, evaluated.
    func computed<R: Arrays>(with file: Manifest.PackedFile, _ body: (PackedWeights) throws -> R) throws -> R {
        try withWeights(file) {
            let result = try body($0)
            eval(result.arrays)
            return result
        }
    }
}
