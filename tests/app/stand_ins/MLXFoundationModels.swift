// The part of mlx-swift-lm’s MLXFoundationModels that the example of docs/mlx-swift-lm.md uses, at commit
// 14414441fa44f45eee35a61e9fa0bab577cf9734 (22 August 2026).

import Foundation
import FoundationModels
import MLXLMCommon

// Libraries/MLXFoundationModels/MLXLanguageModel.swift of github.com/ml-explore/mlx-swift-lm
@available(iOS 27.0, macOS 27.0, visionOS 27.0, *)
public struct MLXLanguageModel: FoundationModels.LanguageModel, Sendable {
    public typealias ContainerLoader =
        @Sendable (
            _ configuration: ModelConfiguration, _ progressHandler: @Sendable @escaping (Progress) -> Void
        ) async throws -> ModelContainer
    public init(
        configuration: ModelConfiguration,
        capabilities: [LanguageModelCapabilities.Capability] = [.guidedGeneration],
        weightsLocation: @Sendable @escaping (String) -> URL, load: @escaping ContainerLoader
    ) {}
    public func preload() async throws {}
    public func evict() async {}
}
