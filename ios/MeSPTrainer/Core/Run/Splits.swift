import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

struct Splits {
    let train: TokenStream.Sequences
    let valid: TokenStream.Sequences?
    let test: TokenStream.Sequences?
    let general: TokenStream.Sequences?
    private let replay: TokenStream.Sequences?
    private let settings: RunSettings

    init(_ bundle: ModelBundle, _ settings: RunSettings) throws {
        self.settings = settings
        let lengths = bundle.manifest.lengths(settings)
        func tokens(_ split: String) throws -> TokenStream? {
            let stream = try bundle.tokens(split)
            try stream?.check(settings.objective, split)
            guard stream?.images == nil || settings.objective == nil && settings.groupSize == nil else {
                throw MeSPError(
                    "The \(split) data has images, which an objective cannot take; leave objective and group_size out.")
            }
            // Sampled answers need one prompt for each sequence.
            let takesPacked = settings.method.takesPacked && settings.groupSize == nil
            guard stream?.packsExamples != true || takesPacked else {
                throw MeSPError(
                    "The \(split) data has several records a sequence, which this run cannot take; write it with mesp data --no-pack."
                )
            }
            return stream
        }
        func sequences(_ split: String) throws -> TokenStream.Sequences? {
            guard let stream = try tokens(split),
                case let sequences = stream.sequences(lengths: lengths, packed: stream.packsExamples),
                sequences.count > 0
            else { return nil }
            guard settings.objective != .kto || sequences.count > 1 else {
                throw MeSPError(
                    "The \(split) data has a single answer for sequences of \(settings.seqLen) tokens, and kto compares answers; add some with mesp data."
                )
            }
            return sequences
        }
        guard let stream = try tokens("train") else {
            throw MeSPError("\(bundle.url.path) holds no training data; add it with mesp data.")
        }
        train = stream.sequences(lengths: lengths, packed: stream.packsExamples)
        guard train.count > 0 else {
            throw MeSPError(
                "The training data has \(stream.tokenCount) tokens, too few for one sequence of \(settings.seqLen) and the token after it; use more data or a shorter sequence."
            )
        }
        if settings.dpClip != nil {
            guard stream.hasWholeRecords else {
                throw MeSPError(
                    "Differential privacy is for records that are a sequence each, and the training data is packed, or has records in several sequences; write it with mesp data --no-pack --long cut."
                )
            }
            guard settings.batchSize <= train.count / (stream.hasPairs ? 2 : 1) else {
                throw MeSPError(
                    "The training data has fewer examples than a step draws on average; lower batch_size.")
            }
        }
        valid = settings.valBatches > 0 ? try sequences("valid") : nil
        guard valid != nil || settings.earlyStopping == 0 else {
            throw MeSPError(
                "Early stopping needs held-out data, and \(bundle.url.path) has none for sequences of \(settings.seqLen) tokens; add it with mesp data."
            )
        }
        test = settings.test ? try sequences("test") : nil
        guard test != nil || !settings.test else {
            throw MeSPError(
                "\(bundle.url.path) has no test data for sequences of \(settings.seqLen) tokens; add it with mesp data."
            )
        }
        func other(_ folder: String?) throws -> TokenStream? {
            try (settings.dryRun ? nil : folder).map { try bundle.tokens(in: URL(fileURLWithPath: $0)) }
        }
        general = try other(settings.general)?.pieces(of: lengths[0]).sequences(lengths: lengths)
        replay = try other(settings.replay)?.sequences(lengths: lengths)
        guard replay?.count != 0 else {
            throw MeSPError("The text to replay has no sequence of \(settings.seqLen) tokens; give it more text.")
        }
        if let general {
            guard general.count > 0 else { throw MeSPError("The general text is empty; give it some text.") }
            guard valid != nil else {
                throw MeSPError(
                    "max_forgetting needs held-out data, and \(bundle.url.path) has none for sequences of \(settings.seqLen) tokens; add it with mesp data."
                )
            }
        }
    }

    private func positions(step: Int) -> [[Int]] {
        let (size, count) = (settings.batchSize, settings.gradAccumulationSteps)
        let first = (settings.firstStep + step) * count
        return (first..<first + count).map { batch in (0..<size).map { batch * size + $0 } }
    }

    func sequences(step: Int) -> [Example] { positions(step: step).joined().map(training) }

    /// Returns the sequence at a position in the training order (from 0).
    private func training(_ position: Int) -> Example {
        guard let replay else { return train.training(position, seed: settings.seed) }
        let before = replayed(before: position)
        return replayed(before: position + 1) > before
            ? replay.training(before, seed: settings.seed) : train.training(position - before, seed: settings.seed)
    }

    private func replayed(before position: Int) -> Int { Int(whole: Double(position) * (settings.replayShare ?? 0)) }

    func replayed(step: Int) -> Int? {
        guard replay != nil else { return nil }
        let (size, step) = (settings.batchSize * settings.gradAccumulationSteps, settings.firstStep + step)
        return replayed(before: (step + 1) * size) - replayed(before: step * size)
    }

    func preferenceBatches(step: Int, _ objective: Objective) -> [[PreferenceAnswer]] {
        positions(step: step).map { batch in
            batch.flatMap { position in
                let index = TokenStream.Sequences.scattered(
                    position, of: train.answerCount(objective), seed: settings.seed)
                return train.answers(index, split: 0, objective)
            }
        }
    }

    /// The number of examples that DP-SGD samples from: sequences, or pairs with an objective.
    var exampleCount: Int { settings.objective.map(train.answerCount) ?? train.count }

    func preferenceBatches(of sequences: TokenStream.Sequences, split: Int32, _ objective: Objective)
        -> [[PreferenceAnswer]]
    {
        let size = objective.takesPairs ? 1 : settings.batchSize
        let count = min(settings.valBatches, sequences.answerCount(objective))
        let whole = stride(from: 0, to: count, by: size).map { start in
            (start..<min(start + size, count)).flatMap { sequences.answers($0, split: split, objective) }
        }
        // A batch of one single answer is left out, because KTO combines each prompt with another record's answer.
        return whole.filter { $0.count > 1 }
    }
}

extension RunSettings {
    /// Sets `steps` to the number of updates of `epochs` passes over the training data, if there are `epochs`.
    package mutating func countSteps() throws {
        guard let epochs else { return }
        let bundle = try ModelBundle(
            url: URL(fileURLWithPath: bundle), text: data.map { URL(fileURLWithPath: $0) }, device: device,
            checksums: false)
        var counting = self
        counting.dryRun = true  // reads no other texts
        let size = Double(batchSize * gradAccumulationSteps) * (1 - (replayShare ?? 0))
        let needed = epochs * Double(try Splits(bundle, counting).exampleCount) / size
        guard needed <= Double(Self.maxSteps) else {
            throw MeSPError("The epochs take more than the \(Self.maxSteps) steps of a run; lower them.")
        }
        // The factor takes back what rounding adds to a whole number of steps.
        (steps, self.epochs) = (max(1, Int(whole: (needed * (1 - 1e-12)).rounded(.up))), nil)
        try check()
    }
}

extension TokenStream {
    fileprivate func check(_ objective: Objective?, _ split: String) throws {
        guard let objective else {
            guard !hasPreferences else {
                let objective: Sentence = hasPairs ? "as dpo" : "kto"
                throw MeSPError(
                    "The \(split) data is preference data; choose an objective for it, \(objective), or other data."
                )
            }
            return
        }
        guard hasPreferences, hasPairs || !objective.takesPairs else {
            let records: Sentence =
                objective.takesPairs ? "prompt, chosen and rejected" : "prompt, completion and label"
            throw MeSPError(
                "The objective \(objective.rawValue) needs records of \(records), and the \(split) data has others; add some with mesp data."
            )
        }
    }
}
