import MeSPBundle

/// An answer to a prompt: the sequence of the prompt and the answer, in which the answer's targets count.
struct PreferenceAnswer {
    let example: Example
    let isGood: Bool
    /// The split, and the examples that the prompt and the answer come from.
    let source: Source
    /// The lengths that sequences may have, in tokens, ascending.
    let lengths: [Int]

    struct Source: Hashable, Comparable {
        var split: Int32
        var prompt: Int32
        var answer: Int32

        static func < (a: Source, b: Source) -> Bool {
            (a.split, a.prompt, a.answer) < (b.split, b.prompt, b.answer)
        }
    }

    /// The sequence with the prompt's targets in the loss instead of the answer's; nil if the prompt has no targets.
    var context: Example? {
        let counted = Set(example.counted)
        let positions = (0..<(example.counted.last ?? 0)).filter { !counted.contains($0) }
        return positions.isEmpty ? nil : Example(tokens: example.tokens, counted: positions)
    }

    /// Returns this prompt with another record's answer, cut to the longest of `lengths`, or padded to the shortest length that holds it.
    func with(answerOf other: PreferenceAnswer) -> PreferenceAnswer {
        PreferenceAnswer(
            example: Example(prompt: example.prompt, answer: other.example.targets, lengths: lengths),
            isGood: other.isGood,
            source: .init(split: source.split, prompt: source.prompt, answer: other.source.answer), lengths: lengths)
    }
}

extension TokenStream.Sequences {
    /// Returns the number of pairs or single answers that an objective takes from preference data.
    func answerCount(_ objective: Objective) -> Int { objective.takesPairs ? count / 2 : count }

    /// Returns the pair, chosen before rejected, or the single answer with the number `index`.
    ///
    /// - Parameter split: the number of the split.
    func answers(_ index: Int, split: Int32, _ objective: Objective) -> [PreferenceAnswer] {
        (objective.takesPairs ? [2 * index, 2 * index + 1] : [index]).map { index in
            let (label, number) = label(index)
            return PreferenceAnswer(
                example: self[index], isGood: label?.isGood ?? true,
                source: .init(split: split, prompt: Int32(number), answer: Int32(number)), lengths: lengths)
        }
    }
}
