/// The layout of a file of functions, named after the first MLX that writes it. An MLX reads only its own.
package enum FunctionLayout: String, Sendable {
    case mlx0311 = "0.31.1"
    /// With metadata after the header, and one more bool in an attention's state.
    case mlx0322 = "0.32.2"

    /// The layout that an MLX reads and writes; nil where it is not known.
    init?(mlx version: String) {
        let numbers = version.split(separator: ".", omittingEmptySubsequences: false).map { Int($0) }
        guard numbers.count == 3, numbers[0] == 0, let minor = numbers[1], let patch = numbers[2] else { return nil }
        switch (minor, patch) {
        case (31, 1...), (32, 0): self = .mlx0311
        case (32, 2...): self = .mlx0322
        default: return nil
        }
    }
}
