// The part of FoundationModels (iOS 27) that the example of docs/mlx-swift-lm.md uses, as mlx-swift-lm uses it at commit
// 14414441fa44f45eee35a61e9fa0bab577cf9734 (22 August 2026).

// Libraries/MLXFoundationModels/MLXLanguageModel.swift, …/README.md of github.com/ml-explore/mlx-swift-lm
public protocol LanguageModel: Sendable {}
public final class LanguageModelSession: Sendable {
    public init(model: some LanguageModel) {}
}
public struct LanguageModelCapabilities: Sendable {
    public struct Capability: Sendable {
        public static var guidedGeneration: Self { Self() }
    }
}
