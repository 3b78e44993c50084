/// The sequences of a run.
struct Splits {
    let train: TokenStream.Sequences
    let valid: TokenStream.Sequences?
    let test: TokenStream.Sequences?

    init(_ bundle: ModelBundle, _ settings: RunSettings) throws {
        func sequences(_ split: String) throws -> TokenStream.Sequences? {
            let sequences = try bundle.tokens(split)?.sequences(length: settings.seqLen)
            return sequences.flatMap { $0.count > 0 ? $0 : nil }
        }
        guard let stream = try bundle.tokens("train") else {
            throw MeSPError("\(bundle.url.path) holds no training data; add it with mesp-data.")
        }
        train = stream.sequences(length: settings.seqLen)
        guard train.count > 0 else {
            throw MeSPError(
                "The training data has \(stream.tokenCount) tokens, and not one sequence of \(settings.seqLen + 1); use more data or a shorter sequence."
            )
        }
        valid = settings.valBatches > 0 ? try sequences("valid") : nil
        guard valid != nil || settings.earlyStopping == 0 else {
            throw MeSPError(
                "Early stopping needs held-out data, and \(bundle.url.path) has none for sequences of \(settings.seqLen) tokens; add it with mesp-data."
            )
        }
        test = settings.test ? try sequences("test") : nil
        guard test != nil || !settings.test else {
            throw MeSPError(
                "\(bundle.url.path) has no test data for sequences of \(settings.seqLen) tokens; add it with mesp-data."
            )
        }
    }

    /// The sequences of step `step` (from 0), in batches.
    func batches(step: Int, _ settings: RunSettings) -> [[Example]] {
        let (size, count) = (settings.batchSize, settings.gradAccumulationSteps)
        return (0..<count).map { batch in
            (0..<size).map { train.training((step * count + batch) * size + $0, seed: settings.seed) }
        }
    }
}
