#if canImport(HostMLXMetal)
    import Foundation
    import HostMLXMetal
    import MLX
    import MeSP
    import MeSPSentences
    import Testing

    @testable import MeSPBundle
    @testable import MeSPControl
    @testable import MeSPCore

    /// Plays lives of an app that trains at night: what the person, the system and an update do to it, in a random order.
    ///
    /// In each life, a run that may train trains, no work uses a GPU that iOS refuses, every call returns, nothing that is left makes a later launch
    /// fail, and the last adapters equal those of an undisturbed run to the last bit. After a memory warning, a run takes another plan, whose sums
    /// are rounded otherwise; then the held-out losses are compared.
    @Suite(.serialized) @MainActor struct LifeTests {
        private static func number(_ name: String) -> Int? {
            ProcessInfo.processInfo.environment[name].flatMap(Int.init)
        }

        static let first = number("MESP_LIFE")

        /// The number of lives; one, if a first life is named. `make test-slow` sets it to 10,000.
        static let count = number("MESP_LIVES") ?? (first == nil ? 200 : 1)

        @Test func livesOfAnApp() async throws {
            Device.gpuIsSimulated = true
            defer { Device.gpuIsSimulated = false }
            let first = Self.first ?? 0
            for seed in first..<first + Self.count {
                let life = try Life(seed: UInt64(seed))
                // On a busy machine a block may take longer than iOS allows.
                do { try await BoundaryGate.$secondsToLeave.withValue(60) { try await life.live() } } catch {
                    Issue.record("Life \(seed): \(life.story.joined(separator: ", ")): \(error.plainSentence.english)")
                }
                await life.end()
            }
        }
    }

    @MainActor private final class Container: AdaptableModel {
        private let monitor: TestMonitor
        private(set) var loaded: URL?
        init(_ monitor: TestMonitor) { self.monitor = monitor }

        func use(_ adapters: URL?) throws {
            guard monitor.scene == .active else { throw MeSPError("Adapters were loaded in the background.") }
            loaded = adapters
        }

        func answer(to prompt: String) -> String { prompt }
    }

    @MainActor private final class Life {
        private(set) var story = [String]()
        private let seed: UInt64
        private var random: FuzzTests.Generator
        private let root = temporaryFolder()
        /// The app's container. It moves at each launch.
        private var home: URL
        private var launches = 0
        private let device: Backend?
        private var weights = 0

        private var monitor = TestMonitor()
        private var clock = TestClock()
        private var controller: RunController
        private var tuner: FineTuner?
        private var container: Container
        private var person: Personalization?
        private var work: Task<Void, Never>?
        private var problem: Sentence?
        private var charging = false
        private var level: Float = 0.8
        private var grant: BackgroundGrant? { controller.grant }
        private var isRefused = false
        private var memoryIsShort = false
        private var isWarned = false

        private static let conversations = (0..<6).map { number in
            Conversation([.user("Hi \(number)"), .assistant("Good day")])
        }
        private static var wholes = [String: Learned]()

        init(seed: UInt64) throws {
            (self.seed, random) = (seed, .init(state: seed))
            home = root.appendingPathComponent("0")
            (controller, container) = (RunController(monitor: monitor, clock: clock), Container(monitor))
            device = [nil, .cpu, .gpu].randomElement(using: &random) ?? nil
            try TinyModel.write(to: model)
        }

        private var model: URL { home.appendingPathComponent("Tiny-4bit") }
        private var bundle: URL { home.appendingPathComponent("Models/tiny.mesp") }
        private var runs: URL { home.appendingPathComponent("runs") }
        private var versions: URL { home.appendingPathComponent("versions") }

        private var options: TrainingOptions {
            var options = TrainingOptions(steps: 8, sequenceLength: 32)
            options.device = device
            return options
        }

        func live() async throws {
            try await launch(in: [.active, .background].randomElement(using: &random) ?? .active)
            for _ in 0..<Int.random(in: 4...12, using: &random) {
                try await event()
                try await settle()
            }
            try await finish()
        }

        func end() async {
            if isRefused { _ = endMetal() }
            isRefused = false
            monitor.scene = .active
            await tuner?.stop()
            await work?.value
            try? FileManager.default.removeItem(at: root)
        }

        private func event() async throws {
            switch Int.random(in: 0..<19, using: &random) {
            case 0, 1: begin()
            case 2: enter(.active)
            case 3: enter(.inactive)
            case 4: enter(.background)
            case 5: try await expire()
            case 6: take([.overnight, .continued, .continuedOnGPU, nil].randomElement(using: &random) ?? nil)
            case 7: change("charger") { charging.toggle() }
            case 8: change("battery") { level = level < 0.2 ? 0.8 : 0.1 }
            case 9:
                let isHot = monitor.thermalState == .nominal
                change(isHot ? "hot" : "cool") { monitor.thermalState = isHot ? .serious : .nominal }
            case 10: try await stop()
            case 11: try await useMLX()
            case 12: try await others()
            case 13: try await fillDisk()
            case 14: try await refresh()
            case 15: change("Low Power Mode") { monitor.isLowPower.toggle() }
            case 16: try await warnOfMemory()
            case 17: freeMemory()
            default: try await kill()
            }
        }

        private func launch(in scene: AppScene) async throws {
            story.append("launch \(scene)")
            (monitor, clock) = (TestMonitor(), TestClock())
            monitor.scene = scene
            (controller, container) = (RunController(monitor: monitor, clock: clock), Container(monitor))
            monitor.battery = .init(level: level, isCharging: charging)
            memoryIsShort = false
            self.controller.observers.append { [unowned self] in
                if !self.controller.isRunning { memoryIsShort = false }
            }
            let (model, bundle, runs, controller) = (model, bundle, runs, controller)
            if Int.random(in: 0..<6, using: &random) == 0 {
                story.append("import interrupted")
                _ = try? await bounded("import") {
                    _ = try await FineTuner(
                        model: model, tokenizer: ByteTokenizer(), bundle: bundle, folder: runs, controller: controller
                    ) { if $0 > 0 { withUnsafeCurrentTask { $0?.cancel() } } }
                }
            }
            let tuner = try await bounded("import") {
                try await FineTuner(
                    model: model, tokenizer: ByteTokenizer(), bundle: bundle, folder: runs, controller: controller)
            }
            self.tuner = tuner
            person = Personalization(tuner, of: container, folder: versions)
            refuseGPU()
        }

        private func kill() async throws {
            guard let tuner else { return }
            story.append("kill")
            launches += 1
            let (old, next) = (home, root.appendingPathComponent("\(launches)"))
            try await bounded("whilePaused") {
                try await tuner.whilePaused { try FileManager.default.copyItem(at: old, to: next) }
            }
            allowGPU()
            monitor.scene = .active
            controller.resume()
            await tuner.stop()
            await work?.value
            (work, problem) = (nil, nil)
            try FileManager.default.removeItem(at: old)
            home = next
            try update()
            try await launch(in: [.active, .background].randomElement(using: &random) ?? .active)
        }

        private func update() throws {
            let file = model.appendingPathComponent("model-00001-of-00002.safetensors")
            switch Int.random(in: 0..<7, using: &random) {
            case 0:
                story.append("new download")
                let date = Date(timeIntervalSince1970: .random(in: 0...1e9, using: &random))
                try FileManager.default.setAttributes([.modificationDate: date], ofItemAtPath: file.path)
            case 1:
                story.append("new version of the library")
                let manifest = bundle.appendingPathComponent("manifest.json")
                guard let text = try? String(contentsOf: manifest, encoding: .utf8) else { return }
                try text.replacing("\"format\":\(Manifest.format)", with: "\"format\":\(Manifest.format - 1)")
                    .write(to: manifest, atomically: true, encoding: .utf8)
            case 2:
                story.append("bundle purged")
                try? FileManager.default.removeItem(at: bundle)
            case 3:
                story.append("runs deleted")
                try? FileManager.default.removeItem(at: runs)
            case 4 where weights < 2:
                story.append("new weights")
                weights += 1
                var data = try Data(contentsOf: file)
                data[data.count - 1] ^= 1
                data[data.count - 5000 * weights] ^= 1
                try data.write(to: file)
            default: break
            }
        }

        private func begin() {
            guard work == nil, let person else { return }
            let isNight = monitor.scene == .background
            story.append(isNight ? "begin at night" : "begin")
            problem = nil
            let options = options
            work = Task {
                do {
                    _ =
                        isNight
                        ? try await person.learn(from: Self.conversations, options, during: .overnight)
                        : try await person.learn(from: Self.conversations, options)
                } catch {
                    self.problem = error.plainSentence
                }
                self.work = nil
            }
            refuseGPU()
        }

        private func change(_ name: String, _ body: () -> Void) {
            story.append(name)
            body()
            monitor.battery = .init(level: level, isCharging: charging)
        }

        private func enter(_ scene: AppScene) {
            story.append("\(scene)")
            if scene != .background { allowGPU() }
            monitor.scene = scene
            refuseGPU()
        }

        private func take(_ grant: BackgroundGrant?) {
            story.append(grant.map { "granted \($0)" } ?? "expired")
            if grant == .continuedOnGPU { allowGPU() }
            tuner?.setBackgroundTime(grant)
            refuseGPU()
        }

        private func expire() async throws {
            story.append("expired")
            work?.cancel()
            try await wait("the run has not ended after the night") { self.work == nil }
            tuner?.setBackgroundTime(nil)
            refuseGPU()
        }

        private func stop() async throws {
            guard let person else { return }
            story.append("stop")
            try await bounded("stop") { await person.stop() }
            try await wait("the run has not ended after a stop") { self.work == nil }
        }

        private func useMLX() async throws {
            guard let tuner else { return }
            story.append("use of MLX")
            try await bounded("whilePaused") {
                await tuner.whilePaused { try? await Task.sleep(for: .milliseconds(2)) }
            }
        }

        private func others() async throws {
            guard let tuner else { return }
            story.append("others")
            let other = try await FineTuner(
                bundle: bundle, tokenizer: ByteTokenizer(), folder: home.appendingPathComponent("other"),
                controller: controller)
            if work != nil {
                let said = try await bounded("train") { () -> Sentence? in
                    do { for try await _ in other.train(on: Self.conversations) {} } catch {
                        return error.plainSentence
                    }
                    return nil
                }
                guard said?.english == "A run is in progress; stop it first." else {
                    throw MeSPError("Another fine-tuner trained: \(said ?? "no error").")
                }
            } else {
                let answer = Task {
                    for try await _ in tuner.answer(to: Conversation([.user("Hi")]), usesAdapters: false) {}
                }
                try? await Task.sleep(for: .milliseconds(1))
                try await bounded("stop of an answer") { await tuner.stop() }
                try await bounded("answer") { try await answer.value }
            }
            try await bounded("whilePaused") { await other.whilePaused {} }
        }

        private func fillDisk() async throws {
            story.append("full disk")
            try await withFullDisk {
                begin()
                try? await Task.sleep(for: .milliseconds(5))
                try await bounded("stop") { [person] in await person?.stop() }
                try await wait("the run has not ended on a full disk") { self.work == nil }
            }
            problem = nil
        }

        private func warnOfMemory() async throws {
            guard work == nil || controller.isRunning else { return }
            story.append("memory warning")
            memoryIsShort = true
            if work != nil { isWarned = true }
            let sleeps = clock.sleeps
            monitor.tell(.memoryWarning)
            try await wait("the pause has no end") { self.clock.sleeps > sleeps }
        }

        private func freeMemory() {
            guard memoryIsShort else { return }
            story.append("memory is free")
            memoryIsShort = false
            clock.advance(by: RunController.memoryPause)
        }

        private func refresh() async throws {
            guard monitor.scene == .active, let person else { return }
            story.append("refresh")
            try await bounded("refresh") { try await person.refresh() }
        }

        private func refuseGPU() {
            guard device == .gpu, monitor.scene == .background, grant != .continuedOnGPU, !isRefused else { return }
            var failing = FailingCommandBuffers(first: 1)
            (failing.count, failing.message) = (.max, FailingCommandBuffers.refusedInBackground)
            beginMetal(.init(failingBuffers: failing))
            isRefused = true
        }

        private func allowGPU() {
            guard isRefused else { return }
            isRefused = false
            let uses = endMetal().commandBuffers
            if uses > 0 { Issue.record("Life \(seed): \(story): \(uses) command buffers in the background") }
        }

        private var mayTrain: Bool {
            let isOnGPU = device == .gpu
            let hasTime =
                switch monitor.scene {
                case .active: true
                case .inactive: !isOnGPU || grant == .continuedOnGPU
                case .background:
                    grant == .continuedOnGPU || !isOnGPU && (grant == .continued || grant == .overnight && charging)
                }
            return hasTime && monitor.thermalState == .nominal && !memoryIsShort
                && (charging || level >= 0.2 && !monitor.isLowPower)
        }

        private func checkProblem() throws {
            guard let problem else { return }
            guard isWarned, problem.english.contains("no plan takes less") else {
                throw MeSPError("A run has failed: \(problem)")
            }
        }

        private var place: [Int] { [controller.log.lastStep, controller.blocksOfStep] }

        private func settle() async throws {
            try checkProblem()
            let before = place
            // The page's code may tell of its background time only now.
            try await wait(
                "\(mayTrain ? "it may train" : "it may not train"), and is \(String(describing: controller.state))"
            ) {
                if self.work == nil { return true }
                if self.mayTrain { return self.place != before }
                if case .paused = self.controller.state { return true }
                return false
            }
            guard work != nil, !mayTrain else { return }
            // The log in `place` comes with messages, which may be late.
            let rest = controller.boundaries
            try await Task.sleep(for: .milliseconds(3))
            guard mayTrain || controller.boundaries == rest else { throw MeSPError("A run that waits has gone on.") }
        }

        private func finish() async throws {
            enter(.active)
            change("all is well") { (charging, level, monitor.thermalState) = (true, 0.8, .nominal) }
            freeMemory()
            guard let person, let tuner else { return }
            try await wait("the run does not end") { self.work == nil }
            try checkProblem()
            let options = options
            for _ in 0..<3 {
                let canContinue = await tuner.canContinueTraining
                guard canContinue || (try? tuner.adapters) == nil else { break }
                _ = try await bounded("learn") { try await person.learn(from: Self.conversations, options) }
            }
            try await bounded("refresh") { try await person.refresh() }
            let whole = try await whole()
            let learned = try Learned(tuner.adapters)
            guard learned.matrices == whole.matrices || isWarned && learned.isNear(whole) else {
                throw MeSPError("The adapters differ; the losses are \(learned.losses) and \(whole.losses).")
            }
            guard let loaded = container.loaded, try Learned.matrices(loaded) == learned.matrices else {
                throw MeSPError("Other adapters are loaded: \(container.loaded?.path ?? "none").")
            }
            try await bounded("rollBack") { try await person.rollBack() }
            let before = container.loaded
            try await bounded("refresh") { try await person.refresh() }
            guard before != loaded, container.loaded == before else {
                throw MeSPError("The adapters were not rolled back.")
            }
        }

        private struct Learned {
            let matrices: Data
            let losses: [Float]

            init(_ adapters: Adapters) throws {
                matrices = try Self.matrices(adapters.url)
                losses = try LogSummary(folder: adapters.url.deletingLastPathComponent()).evals.map(\.loss)
            }

            static func matrices(_ adapters: URL) throws -> Data {
                try Data(contentsOf: adapters.appendingPathComponent("adapters.safetensors"))
            }

            /// Whether the losses after the runs differ by less than 1% of what a run learns. The sums of another plan are rounded otherwise, which the
            /// 8-bit codes of AdamW amplify. A step that is lost or taken twice is about 10% of the 8 steps.
            func isNear(_ other: Learned) -> Bool {
                guard let before = other.losses.first, let after = other.losses.last, let last = losses.last else {
                    return false
                }
                return abs(last - after) < 0.01 * (before - after)
            }
        }

        private func whole() async throws -> Learned {
            let key = "\(device ?? .standard) \(weights)"
            if let whole = Self.wholes[key] { return whole }
            let (model, bundle) = (model, root.appendingPathComponent("undisturbed.mesp"))
            let tuner = try await FineTuner(
                model: model, tokenizer: ByteTokenizer(), bundle: bundle,
                folder: root.appendingPathComponent("undisturbed"), controller: RunController(monitor: TestMonitor()))
            for try await _ in tuner.train(on: Self.conversations, options) {}
            let whole = try Learned(tuner.adapters)
            Self.wholes[key] = whole
            return whole
        }

        /// The number of looks after which a call hangs. A busy machine looks less often in a second.
        private static let most = 100_000

        private func wait(_ what: @autoclosure () -> Sentence, until condition: () -> Bool) async throws {
            for _ in 0..<Self.most {
                if condition() { return }
                try await Task.sleep(for: .milliseconds(1))
            }
            throw MeSPError(what())
        }

        private func bounded<R: Sendable>(
            _ call: Sentence, _ body: @escaping @MainActor @Sendable () async throws -> R
        ) async throws -> R {
            var result: Result<R, any Error>?
            let task = Task {
                do { result = .success(try await body()) } catch { result = .failure(error) }
            }
            try await wait("\(call) has not returned") { result != nil }
            await task.value
            guard let result else { throw CancellationError() }
            return try result.get()
        }
    }
#endif
