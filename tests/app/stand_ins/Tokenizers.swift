// The part of swift-transformers’ Tokenizers that MeSPTokenizers uses.

import Foundation

// Sources/Tokenizers/Tokenizer.swift, Sources/Hub/HubApi.swift of github.com/huggingface/swift-transformers
public typealias Message = [String: any Sendable]
public typealias ToolSpec = [String: any Sendable]
public enum ChatTemplateArgument {
    case literal(String)
    case name(String)
}
public protocol Tokenizer: Sendable {
    func encode(text: String) -> [Int]
    func encode(text: String, addSpecialTokens: Bool) -> [Int]
    func decode(tokens: [Int]) -> String
    func decode(tokens: [Int], skipSpecialTokens: Bool) -> String
    var bosTokenId: Int? { get }
    var eosTokenId: Int? { get }
    var hasChatTemplate: Bool { get }
    func applyChatTemplate(
        messages: [Message], chatTemplate: ChatTemplateArgument?, addGenerationPrompt: Bool, truncation: Bool,
        maxLength: Int?, tools: [ToolSpec]?
    ) throws -> [Int]
    func applyChatTemplate(
        messages: [Message], chatTemplate: ChatTemplateArgument?, addGenerationPrompt: Bool, truncation: Bool,
        maxLength: Int?, tools: [ToolSpec]?, additionalContext: [String: any Sendable]?
    ) throws -> [Int]
}
public struct HubApi: Sendable { public static let shared = HubApi() }
public enum AutoTokenizer {
    public static func from(modelFolder: URL, hubApi: HubApi = .shared, strict: Bool = true) async throws -> Tokenizer {
        fatalError()
    }
}
