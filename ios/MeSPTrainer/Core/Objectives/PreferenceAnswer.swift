import MeSPBundle

struct PreferenceAnswer {
    let example: Example
    let isGood: Bool
    let source: Source
    let lengths: [Int]

    struct Source: Hashable, Comparable {
        var split: Int32
        var prompt: Int32
        var answer: Int32

        static func < (a: Source, b: Source) -> Bool {
            (a.split, a.prompt, a.answer) < (b.split, b.prompt, b.answer)
        }
    }

    var context: Example? {
        let counted = Set(example.counted)
        let positions = (0..<(example.counted.last ?? 0)).filter { !counted.contains($0) }
        return positions.isEmpty
            ? nil
            : Example(
                tokens: example.tokens, counted: positions, images: example.images)
    }

    func with(answerOf other: PreferenceAnswer) -> PreferenceAnswer {
        PreferenceAnswer(
            example: Example(prompt: example.prompt, answer: other.example.targets, lengths: lengths),
            isGood: other.isGood,
            source: .init(split: source.split, prompt: source.prompt, answer: other.source.answer), lengths: lengths)
    }
}

extension TokenStream.Sequences {
    func answerCount(_ objective: Objective) -> Int { objective.takesPairs ? count / 2 : count }

    func answers(_ index: Int, split: Int32, _ objective: Objective) -> [PreferenceAnswer] {
        (objective.takesPairs ? [2 * index, 2 * index + 1] : [index]).map { index in
            let (label, number) = label(index)
            return PreferenceAnswer(
                example: self[index], isGood: label?.isGood ?? true,
                source: .init(split: split, prompt: Int32(number), answer: Int32(number)), lengths: lengths)
        }
    }
}
