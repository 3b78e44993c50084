import MLX
import MeSPSentences

final class ReferenceModel {
    private let start: BlockArrays?
    private var known = [PreferenceAnswer.Source: Float]()

    init(start: BlockArrays?) { self.start = start }

    func logProbability(_ answer: PreferenceAnswer, _ model: BlockwiseModel) throws -> Double {
        if let known = known[answer.source] { return Double(known) }
        let loss = try model.loss(answer.example) { [start] block, _ in
            try start?.read(block).asType(.float32) ?? model.lora.baseParameters(block)
        }
        guard loss.isFinite else { throw try model.notFinite([answer.example]) }
        known[answer.source] = -loss
        return Double(-loss)
    }

    // MARK: - The state of a resumed run

    var vectors: [String: MLXArray] {
        guard !known.isEmpty else { return [:] }
        let known = known.sorted { $0.key < $1.key }
        return [
            "reference.answers": .of(
                known.flatMap { [$0.key.split, $0.key.prompt, $0.key.answer] }, [known.count, 3]),
            "reference.log_probabilities": .of(known.map(\.value)),
        ]
    }

    func restore(_ vectors: (_ name: String) -> MLXArray?) throws {
        guard let answers = vectors("reference.answers"), let values = vectors("reference.log_probabilities") else {
            return
        }
        guard answers.dtype == .int32, values.dtype == .float32, values.ndim == 1, answers.shape == [values.size, 3]
        else { throw MeSPError("The saved state is damaged; start the run again in another folder.") }
        let numbers = try answers.numbers(Int32.self)
        for (index, value) in try values.numbers(Float.self).enumerated() where value.isFinite {
            let first = 3 * index
            known[.init(split: numbers[first], prompt: numbers[first + 1], answer: numbers[first + 2])] = value
        }
    }
}
