/// How gradients are made.
public enum GradientMethod: String, Codable, Sendable, CaseIterable {
    /// The structured backward pass, written out by hand.
    case mesp
    /// The same loop over blocks, with gradients from automatic differentiation.
    case mebp
    /// Zeroth order: two forward passes with a seeded perturbation.
    case mezo
}
