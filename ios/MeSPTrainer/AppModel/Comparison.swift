import Foundation
import MeSPCore
import Observation

/// One prompt, written on by the base model and then by the fine-tuned one, for a view that shows both side by side.
///
/// Texts grow as tokens come. While the app is not in front, writing waits.
@MainActor @Observable public final class Comparison {
    public enum Side: Sendable { case base, tuned }

    /// What one model has written so far.
    public struct Text: Sendable {
        public fileprivate(set) var text = ""
        /// nil until it has ended.
        public fileprivate(set) var summary: Generator.Summary?
        fileprivate var tokens = [Int]()
    }

    /// What to write, and with what.
    public struct Request: Sendable {
        public var prompt = ""
        /// Whether the prompt is a message in the model's chat template, and the text the answer.
        public var isChat = false
        public var maxTokens = 128
        /// 0 takes the likeliest token each time.
        public var temperature: Float = 0
        public var topP: Float = 1
        public var seed: UInt64 = 0

        public init() {}
    }

    public private(set) var base = Text()
    public private(set) var tuned = Text()
    /// The side that is being written; nil where none is.
    public private(set) var writing: Side?
    /// Why it ended early, in a sentence.
    public private(set) var problem: String?

    @ObservationIgnored private let phone: any Phone
    @ObservationIgnored private var gate = PauseGate()

    public init(phone: any Phone) {
        self.phone = phone
        phone.observers.append { [weak self] _ in self?.update() }
    }

    /// Writes both texts, the base model's first. Does nothing while another is being written.
    ///
    /// - Parameter adapters: of the fine-tuned model; without them only the base model writes.
    public func start(_ request: Request, bundle: URL, adapters: URL?, tokenizer: any TextTokenizer) {
        guard writing == nil else { return }
        (base, tuned, problem, writing) = (Text(), Text(), nil, .base)
        let gate = PauseGate()
        self.gate = gate
        update()
        let (messages, sender) = AsyncStream.makeStream(of: Message.self)
        gate.startThread("writing") {
            do {
                let bundle = try ModelBundle(url: bundle)
                let message = ChatMessage(role: "user", content: request.prompt)
                let tokens =
                    request.isChat
                    ? try tokenizer.encode([message], opensAnswer: true) : tokenizer.encode(request.prompt)
                var generation = Generator.Request(prompt: tokens)
                generation.maxTokens = request.maxTokens
                (generation.temperature, generation.topP) = (request.temperature, request.topP)
                generation.seed = request.seed
                generation.stop = tokenizer.endOfText.map { [$0] } ?? []
                for side in adapters == nil ? [Side.base] : [.base, .tuned] {
                    try gate.pass { _ in }
                    let generator = try Generator(bundle, adapters: side == .tuned ? adapters : nil)
                    sender.yield(.begins(side))
                    let summary = try generator.generate(generation, atBlock: { try gate.pass { _ in } }) {
                        sender.yield(.token(side, $0))
                    }
                    sender.yield(.ends(side, summary))
                }
            } catch is CancellationError {
            } catch {
                sender.yield(.failed(error.localizedDescription))
            }
            sender.finish()
        }
        Task {
            for await message in messages { receive(message, tokenizer) }
            writing = nil
        }
    }

    /// Ends both texts at the next block.
    public func stop() { gate.stop() }

    private func update() {
        gate.set(phone.scene == .active ? [] : [.away])
        if phone.scene == .background { gate.waitUntilAtRest(seconds: RunController.leaving) }
    }

    private enum Message: Sendable {
        case begins(Side)
        case token(Side, Int)
        case ends(Side, Generator.Summary)
        case failed(String)
    }

    private func receive(_ message: Message, _ tokenizer: any TextTokenizer) {
        switch message {
        case .begins(let side): writing = side
        case .token(let side, let token): change(side) { $0.append(token, tokenizer) }
        case .ends(let side, let summary): change(side) { $0.summary = summary }
        case .failed(let sentence): problem = sentence
        }
    }

    private func change(_ side: Side, _ body: (inout Text) -> Void) {
        switch side {
        case .base: body(&base)
        case .tuned: body(&tuned)
        }
    }
}

extension Comparison.Text {
    /// A token can end within a character, which then shows when it is whole.
    fileprivate mutating func append(_ token: Int, _ tokenizer: any TextTokenizer) {
        tokens.append(token)
        let text = tokenizer.decode(tokens)
        self.text = text.hasSuffix("\u{FFFD}") ? String(text.dropLast()) : text
    }
}
