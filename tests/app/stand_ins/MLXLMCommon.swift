// The part of mlx-swift-lm’s MLXLMCommon that MeSPMLXLM and docs/mlx-swift-lm.md use, at commit
// 14414441fa44f45eee35a61e9fa0bab577cf9734 (22 August 2026).

import Foundation
import MLX
import MLXNN

// Libraries/MLXLMCommon/Tokenizer.swift, …/TokenizerLoader.swift of github.com/ml-explore/mlx-swift-lm
public protocol Tokenizer: Sendable {
    func encode(text: String, addSpecialTokens: Bool) -> [Int]
    func decode(tokenIds: [Int], skipSpecialTokens: Bool) -> String
    func convertTokenToId(_ token: String) -> Int?
    func convertIdToToken(_ id: Int) -> String?
    var bosToken: String? { get }
    var eosToken: String? { get }
    var unknownToken: String? { get }
    func applyChatTemplate(
        messages: [[String: any Sendable]], tools: [[String: any Sendable]]?, additionalContext: [String: any Sendable]?
    ) throws -> [Int]
}
extension Tokenizer {
    public var eosTokenId: Int? { nil }
    public func applyChatTemplate(messages: [[String: any Sendable]]) throws -> [Int] { [] }
}
public enum TokenizerError: LocalizedError {
    case missingChatTemplate
}
public protocol TokenizerLoader: Sendable {
    func load(from directory: URL) async throws -> any Tokenizer
}

// Libraries/MLXLMCommon/UserInput.swift, …/LanguageModel.swift, …/Evaluate.swift of github.com/ml-explore/mlx-swift-lm
public typealias Message = [String: any Sendable]
public struct UserInput {
    public enum Image {
        case url(URL)
    }
    public init(prompt: String, images: [Image] = []) {}
}
public struct LMInput {
    public struct Text {
        public let tokens: MLXArray
    }
    public let text: Text
}
public protocol UserInputProcessor: Sendable {
    func prepare(input: UserInput) async throws -> LMInput
}
public protocol LanguageModel: Module {}
public struct GenerateParameters: Sendable {
    public init(maxTokens: Int? = nil) {}
}
public enum Generation: Sendable {
    case chunk(String)
    public var chunk: String? { nil }
}
public func generate(input: LMInput, parameters: GenerateParameters, context: ModelContext) throws -> AsyncStream<Generation> {
    fatalError()
}

// Libraries/MLXLMCommon/ModelConfiguration.swift, …/ModelContainer.swift, …/ModelFactory.swift of github.com/ml-explore/mlx-swift-lm
public struct ModelConfiguration: Sendable {
    public init(id: String) {}
}
public struct ModelContext {
    public var model: any LanguageModel
    public var processor: any UserInputProcessor
    public var tokenizer: Tokenizer
}
public final class ModelContainer: Sendable {
    public var tokenizer: Tokenizer {
        get async { fatalError() }
    }
    public func perform<R: Sendable>(
        _ action: @Sendable (ModelContext) async throws -> sending R
    ) async rethrows -> sending R { fatalError() }
}
public func loadModelContainer(
    from directory: URL, using tokenizerLoader: any TokenizerLoader
) async throws -> sending ModelContainer { fatalError() }

// Libraries/MLXLMCommon/Adapters/ModelAdapter.swift, …/LoRA/LoRAContainer.swift, …/LoRA/LoRAModel.swift of github.com/ml-explore/mlx-swift-lm
public protocol ModelAdapter: Sendable {
    func load(into model: LanguageModel) throws
    func fuse(with model: LanguageModel) throws
    func unload(from model: LanguageModel)
}
extension LanguageModel {
    public func load(adapter: ModelAdapter) throws {}
    public func unload(adapter: ModelAdapter) {}
}
public protocol LoRAModel {
    var loraLayers: [Module] { get }
}
public struct LoRAConfiguration: Sendable, Codable {
    public enum FineTuneType: String, Sendable, Codable {
        case lora, dora
    }
    public struct LoRAParameters: Sendable, Codable {
        public let rank: Int
        public let scale: Float
        public let keys: [String]?
        public init(rank: Int = 8, scale: Float = 10.0, dropout: Float = 0.0, keys: [String]? = nil) { fatalError() }
    }
    public let numLayers: Int
    public let fineTuneType: FineTuneType
    public let loraParameters: LoRAParameters
    public init(numLayers: Int = 16, fineTuneType: FineTuneType = .lora, loraParameters: LoRAParameters = .init()) {
        fatalError()
    }
}
public struct LoRAContainer: ModelAdapter, @unchecked Sendable {
    public let configuration: LoRAConfiguration
    public let parameters: ModuleParameters
    public init(configuration: LoRAConfiguration, parameters: consuming ModuleParameters) { fatalError() }
    public static func from(directory: URL) throws -> LoRAContainer { fatalError() }
    public func load(into model: LanguageModel) throws {}
    public func fuse(with model: LanguageModel) throws {}
    public func unload(from model: LanguageModel) {}
}
extension Module {
    public func setLoRAEnabled(_ enabled: Bool) {}
}
