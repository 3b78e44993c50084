import MeSPBundle
import MeSPSentences

extension RunSettings {
    package func check() throws {
        try checkRanges()
        let product = "batch_size · grad_accumulation_steps" + (groupSize == nil ? "" : " · group_size")
        try require(sequences <= Self.maxSequences, product, "at most \(Self.maxSequences)")
        try require(projections?.isEmpty != true, "projections", "one or more")
        try require(epochs != nil || warmup < max(1, steps), "warmup", "less than steps")
        try require(!freezeA || loraplusLrRatio == 1, "loraplus_lr_ratio", "1 with freeze_a, which trains each B only")
        try require(proximalMu == nil || adapters != nil, "adapters", "named with proximal_mu, which stays near them")
        try require(earlyStopping == 0 || evalEvery > 0, "eval_every", "above 0 with early_stopping")
        try require(!test || valBatches > 0, "val_batches", "above 0 with test")
        // KTO's estimate of the KL divergence combines each prompt with the answer of another record.
        try require(objective != .kto || batchSize >= 2, "batch_size", "at least 2 with kto")
        try require(objective != .kto || valBatches != 1, "val_batches", "0, or at least 2 with kto")
        try require(blocksPerStep == nil || method == .mesp, "method", "mesp with blocks_per_step")
        try checkDropout()
        try checkDoRA()
        try checkForgetting()
        try checkRewards()
        try checkPrivacy()
    }

    private func checkDropout() throws {
        guard dropout > 0 else { return }
        // With dropout, MeZO's two losses and an objective's likelihoods would not be comparable. MeBP's block function has no input for a mask.
        try require(method == .mesp, "method", "mesp with dropout")
        try require(["objective": objective == nil, "group_size": groupSize == nil], "left out with dropout") { $0 }
    }

    private func checkDoRA() throws {
        guard dora else { return }
        // MeBP's block function has no input for magnitudes. `max_forgetting` scales B, which does not scale the change of the magnitudes.
        try require(method != .mebp, "method", "mesp or mezo with dora")
        try require(projections?.contains("experts") != true, "projections", "without experts with dora")
        try require(["freeze_a": !freezeA, "max_forgetting": maxForgetting == nil], "left out with dora") { $0 }
    }

    private func checkForgetting() throws {
        try require((replayShare == nil) == (replay == nil), "replay", "named with replay_share, and only with it")
        let isPlain = objective == nil && groupSize == nil && dpClip == nil
        try require(replayShare == nil || isPlain, "replay_share", "left out with objective, group_size or dp_clip")
        try require(
            (maxForgetting == nil) == (general == nil), "general", "named with max_forgetting, and only with it")
        guard maxForgetting != nil else { return }
        try require(valBatches > 0, "val_batches", "above 0 with max_forgetting")
        try require(["objective": objective == nil, "group_size": groupSize == nil], "left out with max_forgetting") {
            $0
        }
    }

    private func checkRewards() throws {
        guard groupSize != nil else { return }
        try require(method.hasBackwardPass, "method", "mesp or mebp with group_size")
        try require(["objective": objective == nil, "dp_clip": dpClip == nil], "left out with group_size") { $0 }
    }

    private func checkPrivacy() throws {
        try require((dpClip == nil) == (dpNoise == nil), "dp_noise", "set with dp_clip, and only with it")
        guard dpClip != nil else { return }
        // MeZO has no gradient for each example. KTO's gradient of an example depends on the batch's other records.
        try require(method != .mezo, "method", "mesp or mebp with dp_clip")
        try require(objective != .kto, "objective", "other than kto with dp_clip")
        try require(
            gradAccumulationSteps == 1, "grad_accumulation_steps", "1 with dp_clip, which takes batch_size alone")
        try require(order != .blocks, "order", "sequences with dp_clip")
        // The examples' gradients are already clipped. A skipped step would reveal something about its examples.
        try require(["max_grad_norm": maxGradNorm == nil, "skip_bad_steps": !skipBadSteps], "left out with dp_clip") {
            $0
        }
    }
}

extension Manifest {
    func lengths(_ settings: RunSettings) -> [Int] {
        let isPacked = settings.data == nil && (data ?? [:]).values.allSatisfy { $0.examples == nil && $0.mask == nil }
        return (isPacked ? [] : seqLens.filter { $0 < settings.seqLen }.sorted()) + [settings.seqLen]
    }

    func functions(of settings: RunSettings) -> Set<String> {
        guard ranks.contains(settings.rank), !settings.needsFormulas,
            let files = settings.processor.functions(of: settings.method)
        else { return [] }
        return Set(lengths(settings).flatMap { length in blocks.compactMap { $0[keyPath: files]["\(length)"] } })
    }

    package func check(_ settings: RunSettings) throws {
        let rank = settings.rank
        let names = architecture.trainableNames
        if let name = settings.projections?.first(where: { !names.contains($0) }) {
            throw MeSPError(
                "The model has no projection \(name); projections must be of \(names.joined(separator: ", ")).")
        }
        guard settings.layouts(of: architecture).contains(where: { !$0.modules.isEmpty }) else {
            throw MeSPError(
                "The last \(settings.numLayers ?? 0) blocks have none of the projections that are to be trained; train more blocks or other projections."
            )
        }
        if settings.method == .mebp, architecture.hasExperts {
            throw MeSPError(
                "\(name) mixes experts, whose choice MeBP cannot differentiate; take another method.")
        }
        guard rank <= architecture.largestRank else {
            throw MeSPError(
                "The rank is \(rank), and the matrices of \(name) have at most rank \(architecture.largestRank); choose a smaller rank."
            )
        }
    }
}

private func require<Value>(
    _ settings: KeyValuePairs<String, Value>, _ wanted: Sentence, _ holds: (Value) -> Bool
) throws {
    for (name, value) in settings { try require(holds(value), name, wanted) }
}

package func require(_ condition: Bool, _ name: String, _ wanted: Sentence) throws {
    guard condition else { throw MeSPError("\(name) must be \(wanted).", .invalidOption(name)) }
}

func requireRange<Number: BinaryInteger>(
    _ name: String, _ value: Number?, least: Int, most: Int? = nil
) throws {
    guard let value else { return }
    try require(value >= least, name, "at least \(least)")
    if let most { try require(value <= most, name, "at most \(most)") }
}

func requireRange<Number: BinaryFloatingPoint>(
    _ name: String, _ value: Number?, least: Int? = nil, above: Int? = nil, below: Int? = nil
) throws {
    guard let value else { return }
    try require(value.isFinite, name, "a finite number")
    if let least { try require(value >= Number(least), name, "at least \(least)") }
    if let above { try require(value > Number(above), name, "above \(above)") }
    if let below { try require(value < Number(below), name, "below \(below)") }
}
