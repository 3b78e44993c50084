import MeSPSentences

@testable import MeSPAdapters
@testable import MeSPBundle

#if canImport(HostMLXMetal)
    import Foundation
    import HostMLXMetal
    import MLX
    import Testing

    @testable import MeSPControl
    @testable import MeSPCore
    @testable import MeSPSelfCheck

    @Suite(.serialized) struct MetalErrors {
        private static func folders(_ names: String...) -> [URL] {
            Fixture.cases.filter { names.contains($0.lastPathComponent) }
        }
        private static let plain = folders("tied-gpu")
        private static let families = folders(
            "tied-gpu", "qwen3_5-gpu", "gemma4-gpu", "lfm2_moe-gpu", "granite-mamba-gpu")

        /// Returns rules under which `count` command buffers fail, beginning with number `buffer`.
        private func failure(_ buffer: Int, _ count: Int = 1) -> MetalRules {
            var failing = FailingCommandBuffers(first: buffer)
            failing.count = count
            // With several failures, each error is thrown when the stream is synchronized, so that each attempt fails once.
            failing.delay = count > 1 ? .max : [.max, 0, 1, 4][buffer % 4]
            failing.garbage = buffer / 4 % 2 == 0 ? .nan : .zeros
            return .init(failingBuffers: failing)
        }

        private func refusal(_ first: Int, _ count: Int = 1) -> MetalRules {
            var failing = FailingCommandBuffers(first: first)
            (failing.areAllocations, failing.count) = (true, count)
            return .init(failingBuffers: failing)
        }

        /// - Parameters:
        ///   - samples: the number of buffers, and of allocations, that are tested; nil for all.
        ///   - work: receives the function `failing`, which runs its argument with a failing buffer or allocation.
        private func compare<R: Equatable>(
            samples: Int? = 6, _ name: String = "",
            _ work: (_ failing: (() throws -> Void) throws -> Void) throws -> R
        ) throws {
            func result(_ rules: MetalRules) throws -> (R, count: Int) {
                var count = 0
                let result = try work { body in
                    let (result, report) = withMetal(rules, body)
                    count = report.commandBuffers
                    #expect(report.faults.isEmpty, "\(name): \(report.faults)")
                    try result.get()
                }
                return (result, count)
            }
            let (expected, buffers) = try result(.init())
            let allocations = try result(refusal(.max)).count
            #expect(buffers > 0 && allocations > 0)
            for (kind, count, rules) in [("buffer", buffers, failure), ("allocation", allocations, refusal)] {
                for number in stride(from: 1, through: count, by: samples.map { count / $0 | 1 } ?? 1) {
                    do {
                        let (found, all) = try result(rules(number, 1))
                        #expect(found == expected, "\(name) \(kind) \(number) of \(count)")
                        // The number of allocations depends on when a thread of MLX lets go of an input's memory.
                        #expect(all >= number || kind == "allocation", "\(name) \(kind) \(number)")
                    } catch {
                        Issue.record("\(name) \(kind) \(number) of \(count): \(error.plainSentence.english)")
                    }
                }
                for number in stride(from: 1, through: count, by: 1 + count / 3) {
                    let error = message { _ = try result(rules(number, .max)) }
                    #expect(
                        error.contains("failed three times") || error.contains("no plan takes less memory"),
                        "\(name) from \(kind) \(number) on: \(error)")
                }
            }
        }

        private func bytes(_ arrays: [String: MLXArray]) -> [String: Data] {
            arrays.mapValues { $0.asData(access: .copy).data }
        }

        private struct Outcome: Equatable {
            var losses = [Float]()
            var vectors = [String: Data]()
        }

        private func steps(
            _ folder: URL, _ method: GradientMethod = .mesp, plan: Plan = Plan(tileBytes: 1 << 20), samples: Int? = 6,
            _ change: @escaping (inout RunSettings) -> Void = { _ in },
            step: @escaping (Trainer, Fixture) throws -> StepResult
        ) throws {
            let fixture = try Fixture(folder, "gradients")
            _ = try fixture.example()  // reads a file
            try compare(samples: samples, folder.lastPathComponent) { failing in
                try fixture.bundle.withDevice {
                    let trainer = try fixture.trainer(method, plan: plan) {
                        $0.learningRate = 0.1
                        change(&$0)
                    }
                    var vectors = try SavedState.vectors(of: trainer)
                    for (name, vector) in vectors where name.hasPrefix("lora") {
                        vectors[name] = try fixture.array(name).asType(vector.dtype)
                    }
                    try SavedState.restore(trainer) { vectors[$0] }
                    var losses = [Float]()
                    try failing {
                        let result = try step(trainer, fixture)
                        losses = [result.loss, result.gradientNorm, result.kl].compactMap { $0 }
                    }
                    return try Outcome(losses: losses, vectors: bytes(SavedState.vectors(of: trainer)))
                }
            }
        }

        @Test(arguments: families) func aStepIsTheSame(_ folder: URL) throws {
            let isSmall = folder == Self.plain.first
            try steps(folder, samples: isSmall ? nil : 6) {
                if isSmall { $0.numLayers = 1 }
            } step: { trainer, fixture in
                try takeStep(trainer, [SequenceLoss([fixture.example()])], number: 0)
            }
        }

        @Test(arguments: plain, ["mebp", "mezo", "adamw8bit", "clipped", "together", "kept", "offloaded", "drawn"])
        func aStepOfAnyKindIsTheSame(_ folder: URL, _ kind: String) throws {
            var plan = Plan(tileBytes: 1 << 20)
            if kind == "together" { plan.order = .blocks }
            if kind == "kept" { plan.keptBlocks = 2 }
            if kind == "offloaded" { plan.offload = .all }
            let sequences = ["clipped", "together", "offloaded"].contains(kind) ? 2 : 1
            try steps(folder, GradientMethod(rawValue: kind) ?? .mesp, plan: plan) {
                $0.batchSize = sequences
                switch kind {
                case "mezo": $0.loraDtype = .bfloat16
                case "adamw8bit": ($0.optimizer, $0.loraDtype) = (.adamw8bit, .bfloat16)
                case "clipped": ($0.maxGradNorm, $0.momentum) = (1e-3, 0.9)
                case "together": $0.optimizer = .adamw
                case "drawn": ($0.blocksPerStep, $0.optimizer) = (0.5, .adamw)
                case "offloaded": ($0.numLayers, $0.momentum) = (2, 0.9)
                default: break
                }
            } step: { trainer, fixture in
                try takeStep(trainer, [SequenceLoss(Array(repeating: fixture.example(), count: sequences))], number: 0)
            }
        }

        @Test(arguments: plain, [Objective.dpo, .orpo, .kto]) func aStepOnPreferencesIsTheSame(
            _ folder: URL, _ objective: Objective
        ) throws {
            var plan = Plan(tileBytes: 1 << 20)
            plan.keepsAnswer = objective == .dpo
            try steps(folder, plan: plan) {
                ($0.objective, $0.batchSize) = (objective, 2)
            } step: { trainer, fixture in
                let answers = try (0..<2).map { index in
                    let example = try fixture.example()
                    let counted = Array(example.counted.dropFirst(4 + index))
                    let number = Int32(index)
                    return PreferenceAnswer(
                        example: Example(tokens: example.tokens, counted: counted), isGood: index == 0,
                        source: .init(split: 0, prompt: number, answer: number), lengths: [fixture.length])
                }
                return try trainer.step([PreferenceBatch(answers, objective)], number: 0)
            }
        }

        @Test(arguments: plain) func aPrivateStepIsTheSame(_ folder: URL) throws {
            let secret = SecretKey()
            try steps(folder) {
                ($0.dpClip, $0.dpNoise) = (1e-3, 1)
            } step: { trainer, fixture in
                let loss = SequenceLoss([try fixture.example()])
                return try trainer.privateStep([loss, loss], secret, number: 0)
            }
        }

        private struct Saved: Equatable {
            var log = [String]()
            var files = [String: Data]()
            var state = [String: Data]()
        }

        private func run(
            _ output: URL, on backend: Backend = .gpu, _ change: (inout RunSettings) -> Void = { _ in },
            atBlock: @escaping () throws -> Void = {}
        ) throws -> Saved {
            var settings = try RunSettings.ofATest(output)
            (settings.steps, settings.valBatches) = (1, 1)
            change(&settings)
            var bundle = try ModelBundle(url: URL(fileURLWithPath: settings.bundle), checksums: false)
            bundle.backend = backend
            var saved = Saved()
            let hooks = RunHooks(
                report: { record, _ in
                    switch record {
                    case .step(let step): saved.log.append("step \(step.step) \(step.loss)")
                    case .eval(let eval): saved.log.append("eval \(eval.step) \(eval.loss)")
                    default: break
                    }
                }, atBlock: { _ in try atBlock() })
            try bundle.withDevice { try Run.run(settings, bundle, hooks) }
            saved.files = files(output)
            saved.state = try tensors(SavedState.url(in: output))
            return saved
        }

        /// Returns the bytes of a file's tensors by name, without an array of MLX, for which memory may be refused here.
        private func tensors(_ file: URL) throws -> [String: Data] {
            let data = try Data(contentsOf: file)
            let begin = 8 + Int(data.withUnsafeBytes { $0.loadUnaligned(as: UInt64.self) })
            let header = try JSONSerialization.jsonObject(with: data[8..<begin]) as? [String: Any] ?? [:]
            var tensors = [String: Data]()
            // `sha256` also depends on the length of the log.
            for (name, entry) in header where name != "sha256" {
                guard let ends = (entry as? [String: Any])?["data_offsets"] as? [Int] else { continue }
                tensors[name] = data[(begin + ends[0])..<(begin + ends[1])]
            }
            return tensors
        }

        private func files(_ output: URL) -> [String: Data] {
            var files = [String: Data]()
            for name in ["adapters/adapters.safetensors", "adapters/peft/adapter_model.safetensors"] {
                files[name] = try? Data(contentsOf: output.appendingPathComponent(name))
            }
            return files
        }

        private func inFolder<R>(_ body: (URL) throws -> R) rethrows -> R {
            let folder = temporaryFolder()
            defer { try? FileManager.default.removeItem(at: folder) }
            return try body(folder)
        }

        @Test func aRunIsTheSame() throws {
            try compare(samples: 20) { failing in
                try inFolder { output in
                    var saved = Saved()
                    try failing { saved = try run(output) { $0.optimizer = .adamw8bit } }
                    return saved
                }
            }
        }

        @Test func aResumedRunIsTheSame() throws {
            try compare { failing in
                try inFolder { output in
                    _ = try run(output)
                    var saved = Saved()
                    try failing { saved = try run(output) { ($0.resume, $0.steps) = (true, 2) } }
                    return saved
                }
            }
        }

        @Test(arguments: [2, 3, 4, 5, 8, 13, 21, 34]) func ofManyErrorsNoneGivesAWrongNumber(_ period: Int) throws {
            let whole = try inFolder { output in try run(output) }
            var rules = failure(period, .max)
            rules.failingBuffers?.period = period
            let result = inFolder { output in withMetal(rules) { try run(output) }.result }
            let error = message { _ = try result.get() }
            #expect(error == "" || error.contains("failed three times"), "\(error)")
            if error == "" { #expect(try result.get() == whole) }
        }

        @Test func whatWasDoneAgainIsLogged() throws {
            try inFolder { output in
                _ = try withMetal(failure(40)) { try run(output) }.result.get()
                let events = try LogSummary(folder: output).events
                #expect(events.map(\.name) == ["gpu_error"])
                #expect(events.first?.message.english.contains("Caused GPU Hang Error") == true)
                #expect(events.allSatisfy { !$0.message.english.contains("..") })
            }
        }

        @Test func workThatFailsThreeTimesEndsTheRun() throws {
            let (whole, buffers) = try inFolder { output in
                let (result, report) = withMetal(.init()) { try run(output) }
                return (try result.get(), report.commandBuffers)
            }
            let twice = try inFolder { output in
                try withMetal(failure(buffers / 2, 2)) { try run(output) }.result.get()
            }
            #expect(twice == whole)
            for buffer in stride(from: 1, through: buffers, by: buffers / 10) {
                try inFolder { output in
                    let error = message {
                        _ = try withMetal(failure(buffer, .max)) { try run(output) }.result.get()
                    }
                    #expect(
                        error.contains("three times") && error.contains("Caused GPU Hang Error"),
                        "buffer \(buffer): \(error)")
                    let files = files(output)
                    #expect(files.isEmpty || files == whole.files, "buffer \(buffer)")
                    let steps = (try? LogSummary(folder: output).steps) ?? []
                    let losses = steps.map { "step \($0.step) \($0.loss)" }
                    #expect(losses.isEmpty || losses == whole.log.filter { $0.hasPrefix("step") }, "buffer \(buffer)")
                }
            }
        }

        @Test(arguments: plain) func bothFormsOfAdaptersAreOfOneStep(_ folder: URL) throws {
            let fixture = try Fixture(folder, "gradients")
            try inFolder { output in
                let places = ["adapters.safetensors", "peft/adapter_model.safetensors"].map(
                    output.appendingPathComponent)
                try fixture.bundle.withDevice {
                    let trainer = try fixture.trainer(.mesp)
                    try trainer.model.lora.save(to: output)
                    let before = try places.map { try Data(contentsOf: $0) }
                    try fixture.restore(trainer)
                    let buffers = withMetal(.init()) {
                        _ = try? trainer.model.lora.save(to: output.appendingPathComponent("other"))
                    }.report.commandBuffers
                    for buffer in 1...buffers {
                        let result = withMetal(failure(buffer, .max)) {
                            try fixture.bundle.withDevice { try trainer.model.lora.save(to: output) }
                        }.result
                        #expect(throws: (any Error).self) { try result.get() }
                        #expect(try places.map { try Data(contentsOf: $0) } == before, "buffer \(buffer)")
                    }
                }
            }
        }

        private func request(_ temperature: Float, _ tokens: Int, prompt: [Int] = [1, 2, 3]) -> Generator.Request {
            var request = Generator.Request(prompt: prompt)
            (request.maxTokens, request.temperature, request.seed) = (tokens, temperature, 3)
            request.topP = temperature > 0 ? 0.9 : 1
            return request
        }

        @Test(arguments: families, [Float(0), 1]) func aTextIsTheSame(_ folder: URL, _ temperature: Float) throws {
            let fixture = try Fixture(folder, "gradients")
            try compare(samples: folder == Self.plain.first ? 40 : 6, folder.lastPathComponent) { failing in
                let generator = try Generator(fixture.bundle)
                var tokens = [Int]()
                try failing {
                    let summary = try generator.generate(request(temperature, 4)) { tokens.append($0) }
                    tokens.append(summary.tokens)
                }
                return tokens
            }
        }

        @Test(arguments: plain) func textsTogetherAreTheSame(_ folder: URL) throws {
            let fixture = try Fixture(folder, "gradients")
            let requests = [request(0, 4), request(1, 2), request(1, 5, prompt: [4, 5])]
            try compare { failing in
                let generator = try Generator(fixture.bundle)
                var texts = [[Int]](repeating: [], count: requests.count)
                try failing {
                    try generator.generate(
                        requests, atOnce: 2, onToken: { texts[$0].append($1) },
                        onEnd: { texts[$0].append(-$1.tokens) })
                }
                return texts
            }
            try compare { failing in
                let generator = try Generator(fixture.bundle)
                var cache = PromptCache()
                var tokens = [Int]()
                try generator.generate(request(0, 3), continuing: &cache) { tokens.append($0) }
                try failing {
                    try generator.generate(request(0, 3, prompt: [1, 2, 3] + tokens + [6]), continuing: &cache) {
                        tokens.append($0)
                    }
                }
                return tokens + [cache.tokens.count]
            }
        }

        @Test(arguments: families) func likelihoodsAreTheSame(_ folder: URL) throws {
            let fixture = try Fixture(folder, "gradients")
            try compare(samples: folder == Self.plain.first ? 40 : 6, folder.lastPathComponent) { failing in
                let evaluator = try Evaluator(fixture.bundle)
                var found = [Double]()
                try failing {
                    let scores = try evaluator.scores(of: [[4, 5], [6], [7, 8, 9]], after: [1, 2, 3])
                    found = scores.map(\.logLikelihood)
                    found.append(try evaluator.logLikelihood(of: Array(1...9), window: 4))
                }
                return found
            }
        }

        @Test(arguments: plain) func theAdaptersAreNotBlamed(_ folder: URL) throws {
            let fixture = try Fixture(folder, "gradients")
            try inFolder { adapters in
                try fixture.bundle.withDevice { try fixture.trainer(.mesp).model.lora.save(to: adapters) }
                func evaluate() throws -> Double {
                    let evaluator = try Evaluator(fixture.bundle, adapters: [.init(adapters)])
                    return try evaluator.logLikelihood(of: Array(1...9), window: 4)
                        + evaluator.divergence(of: Array(1...9), window: 4)
                }
                let (expected, report) = withMetal(.init()) { try evaluate() }
                for buffer in stride(from: 1, through: report.commandBuffers, by: 5) {
                    for count in [1, .max] {
                        let result = withMetal(failure(buffer, count)) { try evaluate() }.result
                        let error = message { _ = try result.get() }
                        #expect(error.contains("three times") == (count == .max), "buffer \(buffer): \(error)")
                        #expect(!error.contains("adapters"), "buffer \(buffer): \(error)")
                        if count == 1 { #expect(try result.get() == expected.get(), "buffer \(buffer)") }
                    }
                }
            }
        }

        @Test(arguments: plain) func adaptersAreReadAgain(_ folder: URL) throws {
            let fixture = try Fixture(folder, "gradients")
            try inFolder { adapters in
                try fixture.bundle.withDevice {
                    let trainer = try fixture.trainer(.mesp)
                    try fixture.restore(trainer)
                    try trainer.model.lora.save(to: adapters)
                }
                for others in [[], [WeightedAdapters(adapters, weight: 0.5)]] {
                    try compare { failing in
                        var found = [Double]()
                        try failing {
                            let all = [WeightedAdapters(adapters)] + others
                            try Generator(fixture.bundle, adapters: all).generate(request(1, 2)) {
                                found.append(Double($0))
                            }
                            found.append(
                                try Evaluator(fixture.bundle, adapters: all).logLikelihood(of: [1, 2, 3], window: 4))
                        }
                        return found
                    }
                }
            }
        }

        @Test(arguments: ["gradients.cpu", "resume"])
        func theSelfCheckFindsNoFault(_ name: String) throws {
            let fixture = try Fixture(try #require(Self.plain.first), "gradients")
            func check(_ rules: MetalRules) throws -> (SelfCheckReport.Check, Int) {
                var settings = SelfCheck.Settings(bundle: fixture.bundle.url.path)
                settings.seconds = 0.02
                let suite = CheckSuite(bundle: fixture.bundle, settings: settings)
                let check = try #require(suite.checks.first { $0.name == name })
                let (result, report) = withMetal(rules) { try SelfCheck.perform(check, fixture.bundle) }
                return (try result.get(), report.commandBuffers)
            }
            let (expected, buffers) = try check(.init())
            #expect(expected.verdict == .pass, "\(expected.sentence.english)")
            for buffer in stride(from: 1, through: buffers, by: max(1, buffers / 8)) {
                for rules in [failure(buffer), refusal(buffer)] {
                    let (found, _) = try check(rules)
                    #expect(found.verdict == .pass, "buffer \(buffer): \(found.sentence.english)")
                    #expect(found.measured.map(\.value) == expected.measured.map(\.value), "buffer \(buffer)")
                }
                let sentence = try check(failure(buffer, .max)).0.sentence.english
                #expect(sentence.contains("failed three times"), "from buffer \(buffer) on: \(sentence)")
            }
        }

        @Test func aRunThatIsAlwaysRefusedEndsWithTheRemedy() throws {
            let buffers = try inFolder { output in withMetal(.init()) { try run(output) }.report.commandBuffers }
            var rules = failure(buffers / 2, .max)
            rules.failingBuffers?.message = FailingCommandBuffers.refusedInBackground
            try inFolder { output in
                let error = message { _ = try withMetal(rules) { try run(output) }.result.get() }
                #expect(error == "iOS refuses the GPU to an app that is not in front; open the app and resume.")
                let errors = try LogSummary(folder: output).events.filter { $0.name == "gpu_error" }
                #expect((1...4).contains(errors.count))
            }
        }

        /// Work that ends while it may not use the GPU does no more on it, also if it ends within a block whose kernels are new.
        @Test func workEndsWithoutTheGPUThatItMayNotUse() throws {
            let bundle = try Fixture(Self.plain[0], "gradients").bundle
            try end("run", by: GPUWithdrawn()) { atBlock in try inFolder { _ = try run($0, atBlock: atBlock) } }
            try end("text", by: CancellationError()) {
                try Generator(bundle).generate(request(0, 4), atBlock: $0) { _ in }
            }
            try end("scores", by: CancellationError()) {
                _ = try Evaluator(bundle).scores(of: [[4, 5], [6]], after: [1, 2, 3], atBlock: $0)
            }
        }

        private func end(
            _ name: String, by error: any Error, _ work: (_ atBlock: @escaping () throws -> Void) throws -> Void
        ) throws {
            let refused = failure(1, .max)
            var (boundary, isComplete) = (1, false)
            while !isComplete {
                var passed = 0
                try? work {
                    passed += 1
                    if passed == boundary { beginMetal(refused) }
                    if passed >= boundary { throw error }
                }
                isComplete = passed < boundary
                if !isComplete { #expect(endMetal().commandBuffers == 0, "\(name), boundary \(boundary)") }
                boundary += 3
            }
            #expect(boundary > 10, "\(name)")
        }

        @Test func aRunThatIsRefusedWaitsForTheFront() throws {
            let (whole, buffers) = try inFolder { output in
                let (result, report) = withMetal(.init()) { try run(output) }
                return (try result.get(), report.commandBuffers)
            }
            var rules = failure(buffers / 2, 4)
            rules.failingBuffers?.message = FailingCommandBuffers.refusedInBackground
            let found = try inFolder { output in
                let (gate, reasons, refused) = (BoundaryGate(), Locked([PauseReason?]()), rules)
                let saved = Locked<Result<Saved, any Error>?>(nil)
                MLXWork.start("run") { [self] in
                    let result = withMetal(refused) {
                        try run(output, atBlock: { try gate.pass { reason in reasons.change { $0.append(reason) } } })
                    }.result
                    saved.change { $0 = result }
                }
                // iOS can refuse work before the app is told that it is in the background.
                var boundaries = -1
                while gate.boundaries == 0 || gate.boundaries != boundaries {
                    boundaries = gate.boundaries
                    usleep(500_000)
                }
                gate.set([.away])
                gate.waitUntilAtRest(seconds: 10)
                boundaries = gate.boundaries
                usleep(1_500_000)
                #expect(gate.boundaries == boundaries && saved.value == nil)
                gate.set([])
                while saved.value == nil { usleep(10_000) }
                #expect(reasons.value == [.away, nil])
                return try #require(saved.value).get()
            }
            #expect(found == whole)
        }

        /// If memory is short for some time, the run continues with plans that take less and less memory. It ends with the remedy only after the
        /// cheapest plan.
        @Test(arguments: [Backend.gpu, .cpu], [5, 8, 14, 20, 30])
        func aRunOutOfMemoryGoesOnWithACheaperPlan(_ backend: Backend, _ count: Int) throws {
            func saved(_ output: URL) throws -> Saved {
                try run(output, on: backend) { ($0.steps, $0.saveEvery) = (3, 1) }
            }
            func losses(_ output: URL) throws -> [Float] {
                let log = try LogSummary(folder: output)
                return log.steps.map(\.loss) + log.evals.map(\.loss)
            }
            let settings = try RunSettings.ofATest(temporaryFolder())
            let planner = Planner(try ModelBundle(url: URL(fileURLWithPath: settings.bundle)).manifest, settings)
            let chain = Array(sequence(first: try planner.plan(), next: planner.cheaper))
            var cheaper = 0
            // On a CPU no error comes late.
            for rules in backend == .gpu ? [failure, refusal] : [refusal] {
                let (whole, total) = try inFolder { output in
                    let (result, report) = withMetal(rules(.max, 1)) { try saved(output) }
                    _ = try result.get()
                    return (try losses(output), report.commandBuffers)
                }
                for number in stride(from: 1, through: total, by: total / 5 | 1) {
                    var rules = rules(number, count)
                    rules.failingBuffers?.message = FailingCommandBuffers.outOfMemory
                    try inFolder { output in
                        let (result, report) = withMetal(rules) { try saved(output) }
                        let name: Comment = "from \(number) of \(total)"
                        #expect(report.faults.isEmpty, name)
                        let log = (try? Data(contentsOf: LogWriter.url(in: output))) ?? Data()
                        let peaks = try log.split(separator: UInt8(ascii: "\n")).compactMap { line -> Int? in
                            guard case .plan(let plan, let prediction) = try LogRecord.read(line).0 else { return nil }
                            #expect(planner.peak(plan) == prediction.predictedPeakBytes)
                            return prediction.predictedPeakBytes
                        }
                        #expect(zip(peaks, peaks.dropFirst()).allSatisfy { $0 > $1 }, name)
                        cheaper += peaks.count > 1 ? 1 : 0
                        do {
                            #expect(try result.get().log.filter { $0.hasPrefix("eval 0") }.count == 1, name)
                            let found = try losses(output)
                            #expect(found.count == whole.count, name)
                            for (a, b) in zip(found, whole) { #expect(abs(a - b) < 1e-5 * b, name) }
                            // The number of allocations varies, so that the last refusal may not be reached.
                            if backend == .cpu, report.commandBuffers >= number {
                                #expect(try #require(peaks.last) < planner.peak(chain[0]), name)
                            }
                        } catch {
                            let sentence = error.plainSentence.english
                            #expect(sentence.contains("no plan takes less memory"), "\(name): \(sentence)")
                            // A plan fails once on a CPU and three times on a GPU.
                            #expect(count >= chain.count * (backend == .gpu ? 3 : 1), "\(name)")
                        }
                    }
                }
            }
            // On a CPU, every operation until the error is thrown uses up a refusal: some 30 in the first evaluation, by timing. The rest can be more
            // than all plans use up.
            #expect(cheaper > 0 || backend == .cpu && count == 30)
        }
    }
#endif
