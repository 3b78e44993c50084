/// An answer to a prompt: the sequence of both, in which the answer's targets count.
struct JudgedAnswer {
    let example: Example
    let isGood: Bool
    /// The split and the examples of the prompt and the answer.
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

    /// The prompt's part of the sequence, whose targets count for it alone; nil where it has none.
    var context: Example? {
        let counted = Set(example.counted)
        let positions = (0..<(example.counted.last ?? 0)).filter { !counted.contains($0) }
        return positions.isEmpty ? nil : Example(tokens: example.tokens, counted: positions)
    }

    /// This prompt with another's answer, cut to the longest length, or padded to the next.
    func with(answerOf other: JudgedAnswer) -> JudgedAnswer {
        let prompt = example.tokens.prefix((example.counted.first ?? 0) + 1)
        let longest = (lengths.last ?? 0) + 1
        let tokens = prompt + other.example.targets.prefix(longest - prompt.count)
        let length = (lengths.first { tokens.count <= $0 + 1 } ?? longest - 1) + 1
        return JudgedAnswer(
            example: Example(
                tokens: tokens + [Int32](repeating: 0, count: length - tokens.count),
                counted: Array(prompt.count - 1..<tokens.count - 1)),
            isGood: other.isGood,
            source: .init(split: source.split, prompt: source.prompt, answer: other.source.answer), lengths: lengths)
    }
}

/// The preference data of a split, as an objective takes it: pairs of a chosen and a rejected one, or one by one.
struct JudgedAnswers {
    private let sequences: TokenStream.Sequences
    private let split: Int32
    private let takesPairs: Bool

    /// - Parameters:
    ///   - split: a number of the split.
    ///   - objective: one that the sequences have the labels for.
    init(_ sequences: TokenStream.Sequences, split: Int32, _ objective: Objective) {
        (self.sequences, self.split, takesPairs) = (sequences, split, objective.takesPairs)
    }

    /// The number of pairs or single answers.
    var count: Int { takesPairs ? sequences.count / 2 : sequences.count }

    /// The pair, chosen before rejected, or the answer with this number.
    subscript(index: Int) -> [JudgedAnswer] {
        takesPairs ? [answer(2 * index), answer(2 * index + 1)] : [answer(index)]
    }

    /// The pair or answer at this position of training, in the order of `TokenStream.Sequences.training`.
    func training(_ position: Int, seed: UInt64) -> [JudgedAnswer] {
        self[TokenStream.Sequences.scattered(position, of: count, seed: seed)]
    }

    private func answer(_ index: Int) -> JudgedAnswer {
        let (label, number) = sequences.label(index)
        return JudgedAnswer(
            example: sequences[index], isGood: label?.isGood ?? true,
            source: .init(split: split, prompt: Int32(number), answer: Int32(number)), lengths: sequences.lengths)
    }
}
