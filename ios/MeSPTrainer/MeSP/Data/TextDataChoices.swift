import Foundation
import MeSPBundle
import MeSPSentences

extension TextData {
    /// Returns the training data and the held-out data, by the name of the split. Each choice becomes two examples: the chosen answer, then the
    /// rejected answer. Leaves out a choice if the sequence length cuts off one of its two answers completely.
    func pairs(
        _ choices: [Choice], _ notices: inout DataNotices, _ progress: (Double) throws -> Void
    ) throws -> [String: TokenStream] {
        try needTemplate()
        var (pairs, refusals) = ([[Encoded]](), RefusedRecords())
        var encoder = ConversationEncoder(tokenizer: tokenizer, answersOnly: true)
        for (index, choice) in choices.enumerated() {
            try refusals.collect(RecordPlace(number: index + 1, kind: .choice, file: nil)) {
                if let pair = try pair(choice, &encoder, &notices) { pairs.append(pair) }
            }
            try progress(Double(index + 1) / Double(choices.count))
        }
        try refusals.check()
        guard pairs.count > 1 else { throw Self.tooFew(choices: choices.count, pairs.count, length) }
        let held = max(pairs.count / Self.heldOut, 1)
        return [
            "train": Self.stream(pairs.dropLast(held).joined(), inPairs: true),
            "valid": Self.stream(pairs.suffix(held).joined(), inPairs: true),
        ]
    }

    static func tooFew(choices: Int, _ fit: Int, _ length: Int) -> MeSPError {
        MeSPError(
            "Of \(choices) choices \(fit) fit sequences of \(length) tokens, too few to train on and hold out one; make some more."
        )
    }

    func pair(
        _ choice: Choice, _ encoder: inout ConversationEncoder, _ notices: inout DataNotices
    ) throws -> [Encoded]? {
        var (pair, unseen) = ([Encoded](), DataNotices(length: length))
        for answer in [choice.chosen, choice.rejected] {
            var conversation = try TextDocuments.conversation(Conversation(choice.prompt + [.assistant(answer)]).fields)
            conversation.prompt = choice.prompt.count
            let result = try encoder.encode(conversation)
            notices.take(result)
            if let example = cut(result.tokens, result.counted, &unseen) { pair.append(example) }
        }
        guard pair.count == 2 else {
            notices.tooLong += 1
            return nil
        }
        if unseen.cut > 0 { notices.cut += 1 }
        return pair
    }
}
