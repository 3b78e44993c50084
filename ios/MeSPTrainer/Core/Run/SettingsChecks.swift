import MeSPBundle

extension RunSettings {
    /// Throws a sentence about a setting that is out of range, or does not go with another.
    public func check() throws {
        // So high that nobody minds, and so low that no product of them overflows.
        let most = Self.mostSteps
        try require(["steps": steps, "first_step": firstStep], "0 or more and at most \(most)") {
            (0...most).contains($0)
        }
        try require(
            ["batch_size": batchSize, "grad_accumulation_steps": gradAccumulationSteps],
            "at least 1 and at most \(most)"
        ) { (1...most).contains($0) }
        try require(
            (2...Self.mostGroup).contains(groupSize ?? 2), "group_size", "at least 2 and at most \(Self.mostGroup)")
        let product = "batch_size · grad_accumulation_steps" + (groupSize == nil ? "" : " · group_size")
        try require(sequences <= Self.maxSequences, product, "at most \(Self.maxSequences)")
        try require(["seq_len": seqLen, "rank": rank, "num_layers": numLayers ?? 1], "at least 1") { $0 >= 1 }
        try require(
            [
                "val_batches": valBatches, "eval_every": evalEvery, "early_stopping": earlyStopping,
                "save_every": saveEvery,
            ], "0 or more"
        ) { $0 >= 0 }
        let positive: KeyValuePairs<String, Float?> = [
            "alpha": alpha, "beta": beta, "desirable_weight": desirableWeight, "undesirable_weight": undesirableWeight,
            "learning_rate": learningRate, "epsilon": epsilon, "proximal_mu": proximalMu, "max_grad_norm": maxGradNorm,
            "dp_clip": dpClip, "mezo_epsilon": mezoEpsilon,
        ]
        try require(positive, "a positive number") { $0.map { $0.isFinite && $0 > 0 } ?? true }
        let notNegative: KeyValuePairs<String, Float?> = [
            "gamma": gamma, "weight_decay": weightDecay, "dp_noise": dpNoise,
        ]
        try require(notNegative, "0 or more") { $0.map { $0.isFinite && $0 >= 0 } ?? true }
        try require(["momentum": momentum, "beta1": beta1, "beta2": beta2], "0 or more and less than 1") {
            (0..<1).contains($0)
        }
        try require(memoryLimitMb ?? 1 > 0 && memoryLimitMb ?? 1 < 1e9, "memory_limit_mb", "a positive number")
        try require(projections?.isEmpty != true, "projections", "one or more")
        try require((0..<max(1, steps)).contains(warmup), "warmup", "0 or more and less than steps")
        try require(proximalMu == nil || adapters != nil, "adapters", "named with proximal_mu, which stays near them")
        try require(earlyStopping == 0 || evalEvery > 0, "eval_every", "above 0 with early_stopping")
        // KTO's estimate of the divergence takes each prompt with the answer of another record.
        try require(objective != .kto || batchSize >= 2, "batch_size", "at least 2 with kto")
        try require(objective != .kto || valBatches != 1, "val_batches", "0, or at least 2 with kto")
        try checkForgetting()
        try checkRewards()
        try checkPrivacy()
    }

    private func checkForgetting() throws {
        try require((replayShare == nil) == (replay == nil), "replay", "named with replay_share, and only with it")
        try require(replayShare.map { $0 > 0 && $0 < 1 } ?? true, "replay_share", "above 0 and below 1")
        let isPlain = objective == nil && groupSize == nil && dpClip == nil
        try require(replayShare == nil || isPlain, "replay_share", "left out with objective, group_size or dp_clip")
        try require(
            (maxForgetting == nil) == (general == nil), "general", "named with max_forgetting, and only with it")
        guard let maxForgetting else { return }
        try require(maxForgetting.isFinite && maxForgetting >= 0, "max_forgetting", "0 or more")
        try require(valBatches > 0, "val_batches", "above 0 with max_forgetting")
        try require(["objective": objective == nil, "group_size": groupSize == nil], "left out with max_forgetting") {
            $0
        }
    }

    private func checkRewards() throws {
        guard groupSize != nil else { return }
        try require((1...Self.mostSteps).contains(maxTokens), "max_tokens", "at least 1 and at most \(Self.mostSteps)")
        try require(method.hasBackwardPass, "method", "mesp or mebp with group_size")
        try require(["objective": objective == nil, "dp_clip": dpClip == nil], "left out with group_size") { $0 }
    }

    private func checkPrivacy() throws {
        try require((dpClip == nil) == (dpNoise == nil), "dp_noise", "set with dp_clip, and only with it")
        guard dpClip != nil else { return }
        // MeZO has no gradient of an example, and KTO's depends on the batch's other records.
        try require(method != .mezo, "method", "mesp or mebp with dp_clip")
        try require(objective != .kto, "objective", "other than kto with dp_clip")
        try require(
            gradAccumulationSteps == 1, "grad_accumulation_steps", "1 with dp_clip, which takes batch_size alone")
        try require(order != .blocks, "order", "sequences with dp_clip")
        // The noised gradient needs no other limit; and whether a step was skipped would tell of its examples.
        try require(["max_grad_norm": maxGradNorm == nil, "skip_bad_steps": !skipBadSteps], "left out with dp_clip") {
            $0
        }
    }
}

extension Manifest {
    /// The numbers of inputs that a run's sequences have, ascending: `seqLen` and, unless all data is packed, what the bundle has
    /// that is shorter.
    func lengths(_ settings: RunSettings) -> [Int] {
        let isPacked = settings.data == nil && (data ?? [:]).values.allSatisfy { $0.examples == nil && $0.mask == nil }
        return isPacked ? [settings.seqLen] : seqLens.filter { $0 <= settings.seqLen }.sorted()
    }

    /// Throws where the block function has no trace for the settings' length or rank, or the blocks lack a projection to train.
    package func check(_ settings: RunSettings) throws {
        let (length, rank) = (settings.seqLen, settings.rank)
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
                "\(name) mixes experts, and MeBP differentiates a function, which such blocks have not; take another method."
            )
        }
        guard seqLens.contains(length) else {
            throw MeSPError(
                "\(name) has no trace for sequences of \(length) tokens, only for \(list(seqLens)); choose one of these or export it with --seq-len \(String(length))."
            )
        }
        guard ranks.contains(rank) else {
            throw MeSPError(
                "\(name) has no trace for rank \(rank), only for \(list(ranks)); choose one of these or export it with --rank \(rank)."
            )
        }
    }
}

private func list(_ numbers: [Int]) -> String { numbers.map(String.init).joined(separator: ", ") }

/// Throws a sentence about the first of some settings that does not meet a condition.
private func require<Value>(
    _ settings: KeyValuePairs<String, Value>, _ wanted: Sentence, _ holds: (Value) -> Bool
) throws {
    for (name, value) in settings { try require(holds(value), name, wanted) }
}

/// Throws a sentence about a setting that is out of range.
func require(_ condition: Bool, _ name: String, _ wanted: Sentence) throws {
    guard condition else { throw MeSPError("\(name) must be \(wanted).") }
}
