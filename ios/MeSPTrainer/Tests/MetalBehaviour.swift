@testable import MeSPBundle

#if canImport(HostMLXMetal)
    import Foundation
    import HostMLXMetal
    import MLX
    import Testing

    @testable import MeSPCore
    @testable import MeSPSelfCheck

    /// Tests the core with a build of MLX that imitates Metal on a CPU.
    @Suite(.serialized) struct MetalBehaviour {
        private static let plain = Fixture.tied.map { [$0] } ?? []
        private static let gpu = Fixture.cases.filter { $0.lastPathComponent.contains("gpu") }

        private func gradients(_ fixture: Fixture, _ method: GradientMethod = .mesp) throws -> [MLXArray] {
            try fixture.bundle.withDevice {
                var gradients = [MLXArray]()
                _ = try fixture.backpropagate(fixture.trainer(method)) { gradients.append($1) }
                return gradients
            }
        }

        #if os(Linux)
            @Test(arguments: plain) func productsOfFloat32KeepTheirPrecision(_ folder: URL) throws {
                setenv("MLX_ENABLE_TF32", "0", 1)  // as MLXSupport does before the first use of MLX
                let fixture = try Fixture(folder, "gradients")
                let exact = try gradients(fixture)
                let metal = try withMetal(.init(tf32: true)) { try gradients(fixture) }.result.get()
                for (ours, exact) in zip(metal, exact) { #expect(relativeError(ours, exact) == 0) }
            }
        #endif

        private func checked(_ name: String, _ rules: MetalRules) throws -> SelfCheckReport.Check {
            let bundle = try ModelBundle(url: try tiedBundle())
            var settings = SelfCheck.Settings(bundle: bundle.url.path)
            settings.seconds = 0.02
            let suite = CheckSuite(bundle: bundle, settings: settings)
            let check = try #require(suite.checks.first { $0.name == name })
            return try withMetal(rules) { try SelfCheck.perform(check, bundle) }.result.get()
        }

        #if os(Linux)
            @Test func theSelfCheckSeesTF32() throws {
                setenv("MLX_ENABLE_TF32", "1", 1)
                defer { setenv("MLX_ENABLE_TF32", "0", 1) }
                let found = try checked("tf32", .init(tf32: true))
                #expect(found.measured.first { $0.name == "in force" }?.value == 1, "\(found.sentence.english)")
            }
        #endif

        private func refused(from first: Int) -> MetalRules {
            var failing = FailingCommandBuffers(first: first)
            (failing.areAllocations, failing.count) = (true, .max)
            return .init(failingBuffers: failing)
        }

        /// If all allocations fail from one on, the run ends with the error. The run logs no wrong loss and saves no partial adapters.
        @Test(
            arguments: zip([GradientMethod.mesp, .mesp, .mebp, .mezo], [RunSettings.Offload.none, .all, .none, .all]))
        func anErrorEndsTheRunWhereItOccurs(_ method: GradientMethod, _ offload: RunSettings.Offload) throws {
            func run(_ rules: MetalRules) throws -> (error: String, report: MetalReport, log: [String], adapters: Data?)
            {
                let output = temporaryFolder()
                var settings = try RunSettings.ofATest(output)
                (settings.method, settings.offload, settings.steps, settings.valBatches) = (method, offload, 2, 1)
                var steps = [String]()
                let (result, report) = withMetal(rules) {
                    try Run.run(
                        settings,
                        report: { record, line in
                            if case .step = record { steps.append(String(decoding: line, as: UTF8.self)) }
                        })
                }
                let adapters = try? Data(contentsOf: output.appendingPathComponent("adapters/adapters.safetensors"))
                return (message { try result.get() }, report, steps, adapters)
            }
            let whole = try run(.init())
            #expect(whole.error == "" && whole.log.count == 2 && whole.adapters != nil)
            let losses = whole.log.map(loss)

            for share in [0, 2, 4, 6] {
                let first = 1 + (whole.report.commandBuffers - 1) * share / 6
                let (error, report, log, adapters) = try run(refused(from: first))
                #expect(error.contains("no plan takes less memory"), "allocation \(first): \(error)")
                #expect(report.faults == [:], "allocation \(first)")
                #expect(adapters == nil || adapters == whole.adapters, "allocation \(first)")
                #expect(log.map(loss) == Array(losses.prefix(log.count)), "allocation \(first)")
                // A failed run stops at the end of the current block or head.
                #expect(report.commandBuffers - first < 80, "allocation \(first): \(report.commandBuffers - first)")
            }
        }

        private func loss(_ line: String) -> Double? {
            (try? JSONSerialization.jsonObject(with: Data(line.utf8)) as? [String: Any])?["loss"] as? Double
        }

        @Test(arguments: plain) func anErrorEndsAText(_ folder: URL) throws {
            let generator = try Generator(ModelBundle(url: folder.appendingPathComponent("bundle.mesp")))
            func text() throws -> [Int] { try generator.text([1, 2, 3], maxTokens: 4) }
            let expected = try text()
            let allocations = withMetal(refused(from: .max)) { try text() }.report.commandBuffers
            for first in stride(from: 1, through: allocations, by: allocations / 20 | 1) {
                let (result, report) = withMetal(refused(from: first)) { try text() }
                #expect(message { _ = try result.get() }.contains("Unable to allocate"), "allocation \(first)")
                #expect(report.faults == [:], "allocation \(first)")
                #expect(try text() == expected, "after allocation \(first)")
            }
        }

        @Test(arguments: plain) func anErrorInATraceIsNotRemembered(_ folder: URL) throws {
            let fixture = try Fixture(folder, "gradients")
            let imported = try #require(
                fixture.bundle.importFunctions(
                    \.plainFunctions, length: fixture.length, rank: fixture.bundle.manifest.ranks[0])[0])
            let function = BlockFunction(imported, isFused: true)
            let trainer = try fixture.trainer(.mesp)
            #expect(throws: (any Error).self) {
                try fixture.bundle.withBlock(0) { weights in
                    let block = try trainer.model.block(0, weights, MLXArray.zeros([1, 1]))
                    _ = try function(block).output(MLXArray(0))
                }
            }
            let x = try trainer.model.embed(fixture.example())
            for _ in 0..<2 {
                try fixture.bundle.withBlock(0) { weights in
                    let block = function(try trainer.model.block(0, weights, x[0]))
                    #expect(try block.output(x).shape == x.shape)
                }
            }
        }

        /// In the first step `atBlock` is also called within blocks, because a GPU compiles kernels during that step.
        @Test(arguments: gpu, [GradientMethod.mesp, .mebp])
        func theFirstStepWaitsWithinItsBlocks(_ folder: URL, _ method: GradientMethod) throws {
            let fixture = try Fixture(folder, "gradients")
            guard fixture.exactMethods.contains(method) else { return }
            let trainer = try fixture.trainer(method)
            var (places, gradients) = ([0, 0], [Gradients]())
            for step in 0..<2 {
                trainer.work.atBlock = { places[step] += 1 }
                gradients.append(try fixture.gradients(trainer))
                trainer.model.work.isWarm = true
            }
            #expect(method == .mesp ? places[0] > 10 * places[1] / 2 : places[0] > places[1] + 2 * 8)
            #expect(gradients[0].loss == gradients[1].loss)
            for (block, gradient) in gradients[0].blocks {
                #expect(gradient.arrayEqual(try #require(gradients[1].blocks[block])).item(Bool.self))
            }
        }

        @Test(arguments: gpu) func theFirstTextWaitsWithinItsBlocks(_ folder: URL) throws {
            let fixture = try Fixture(folder, "gradients")
            let request = Generator.Request([1, 2, 3, 4, 5], maxTokens: 4)
            let generator = try Generator(fixture.bundle)
            var (places, texts) = ([0, 0], [[Int]](repeating: [], count: 2))
            for text in 0..<2 {
                func pass() { places[text] += 1 }
                try generator.generate(request, atBlock: pass) { texts[text].append($0) }
            }
            // A text takes four forward passes. In the first text, two of the passes also wait within blocks.
            #expect(places[1] == 4 * fixture.layers && places[0] > 5 * 2 * fixture.layers)
            #expect(texts[0] == texts[1])

            struct Refused: Error {}
            var calls = 0
            func refuse() throws {
                calls += 1
                if calls == 3 { throw Refused() }
            }
            #expect(throws: Refused.self) {
                try Generator(fixture.bundle).generate(request, atBlock: refuse) { _ in }
            }
            #expect(calls == 3)
        }

        /// For example, a full disk, where the log gets no record of a pause's end.
        @Test(arguments: gpu) func afterAnErrorAtABoundaryNoGPUIsUsed(_ folder: URL) throws {
            struct DiskIsFull: Error {}
            let fixture = try Fixture(folder, "gradients")
            Device.gpuIsSimulated = true
            defer { Device.gpuIsSimulated = false }
            let trainer = try fixture.bundle.withDevice { try fixture.trainer(.mesp) }
            var (place, ended) = (0, false)
            while !ended {
                var calls = 0
                trainer.work.atBlock = {
                    calls += 1
                    guard calls > place else { return }
                    if calls == place + 1 { beginMetal(.init()) }
                    throw DiskIsFull()
                }
                do {
                    _ = try fixture.bundle.withDevice { try fixture.backpropagate(trainer) { _, _ in } }
                } catch is DiskIsFull {}
                ended = calls <= place
                if !ended { #expect(endMetal().commandBuffers == 0, "boundary \(place)") }
                place += 1
            }
            #expect(place > 10)
        }

        @Test(arguments: [GradientMethod.mesp, .mebp, .mezo])
        func aCPUBundleTrainsOnTheCPU(_ method: GradientMethod) throws {
            let output = temporaryFolder()
            var settings = try RunSettings.ofATest(output)
            (settings.method, settings.steps, settings.valBatches) = (method, 2, 1)
            let result = withMetal(.init(gpuByDefault: true)) {
                try Run.run(settings)
                let a = MLXArray([1, 2])
                #expect(throws: MLXError.self) {
                    try withError {
                        Device.withDefaultDevice(.cpu) {
                            MLX.eval(vjp({ [$0[0] * $0[0]] }, primals: [a], cotangents: [a]).1)
                        }
                    }
                }
            }.result
            #expect(message { try result.get() } == "")
        }

        @Test(arguments: Fixture.cases) func aCPUBundleGeneratesAndDifferentiatesOnTheCPU(_ folder: URL) throws {
            let fixture = try Fixture(folder, "gradients")
            let result = withMetal(.init(gpuByDefault: true)) {
                var request = Generator.Request([1, 2, 3], maxTokens: 3)
                (request.temperature, request.topP) = (1, 0.9)
                try Generator(fixture.bundle).generate(request) { _ in }
                for method in fixture.exactMethods {
                    try fixture.bundle.withDevice {
                        let trainer = try fixture.trainer(method)
                        for _ in 0..<2 { _ = try fixture.backpropagate(trainer) { _, _ in } }
                    }
                }
            }.result
            #expect(message { try result.get() } == "")
        }
    }
#endif
