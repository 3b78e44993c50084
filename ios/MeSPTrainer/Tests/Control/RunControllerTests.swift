import Foundation
import MLX
import Testing

@testable import MeSPBundle
@testable import MeSPControl
@testable import MeSPCore

@Suite(.serialized) @MainActor final class RunControllerTests {
    private let monitor = TestMonitor()
    private let clock = TestClock()
    private let folder = temporaryFolder()
    private lazy var controller = RunController(monitor: monitor, clock: clock)

    private func settings(_ name: String = "run", steps: Int = 1_000_000) throws -> RunSettings {
        var settings = try RunSettings.ofATest(folder.appendingPathComponent(name))
        (settings.steps, settings.learningRate, settings.saveEvery) = (steps, 0.05, 0)
        return settings
    }

    private func wait(_ comment: Comment, until condition: () -> Bool) async throws {
        let limit = Date(timeIntervalSinceNow: 900)  // a hang, and no slow machine
        while !condition() {
            try #require(Date.now < limit, comment)
            try await Task.sleep(for: .milliseconds(2))
        }
    }

    private func reach(_ state: RunController.State) async throws {
        try await wait("the state is \(controller.state) and not \(state)") { controller.state == state }
    }

    private func train() async throws {
        controller.start(try settings())
        try await reach(.training)
    }

    private func end() async throws {
        controller.stop()
        try await reach(.finished(.stopped))
    }

    private func events() throws -> [String] {
        try LogSummary(folder: folder.appendingPathComponent("run")).events.map { "\($0.name): \($0.message.english)" }
    }

    private func losses(_ name: String) throws -> [Float] {
        try LogSummary(folder: folder.appendingPathComponent(name)).steps.map(\.loss)
    }

    @Test func runsFromIdleToFinished() async throws {
        #expect(controller.state == .idle)
        controller.start(try settings(steps: 5))
        #expect(controller.state == .preparing)
        try await reach(.finished(.finished))
        #expect(controller.log.steps.map(\.step) == Array(1...5))
        #expect(controller.log.prediction != nil)
        #expect(controller.log.end?.reason == .finished)
    }

    @Test func pausedAtRandomGivesTheSameLosses() async throws {
        try await train()
        for _ in 0..<6 {
            controller.pause()
            try await reach(.paused(.user))
            controller.resume()
            try await reach(.training)
            try await Task.sleep(for: .milliseconds(Int.random(in: 1...40)))
        }
        try await end()
        let paused = try losses("run")
        try Run.run(try settings("uninterrupted", steps: max(paused.count, 1)))
        #expect(try paused == losses("uninterrupted").prefix(paused.count).map { $0 })
    }

    @Test(arguments: GradientMethod.allCases) func pausedAtEachBoundaryOfAStepGivesTheSameLosses(
        _ method: GradientMethod
    )
        throws
    {
        func losses(_ name: String, atBlock: @escaping () -> Void) throws -> [Float] {
            var settings = try settings(name, steps: 3)
            settings.method = method
            try Run.run(settings, atBlock: { _ in atBlock() })
            return try self.losses(name)
        }
        let layers = try ModelBundle(url: URL(fileURLWithPath: settings().bundle)).architecture.numHiddenLayers
        var boundaries = 0
        let uninterrupted = try losses("\(method)") { boundaries += 1 }
        #expect(
            boundaries == 1 + 3 * (method == .mezo ? 3 * layers + 2 : 2 * layers + 1), "the first makes the trainer")
        let paused = try losses("\(method)-paused") {
            MLX.eval(MLXArray.ones([64, 64]).matmul(MLXArray.ones([64, 64])))
            Memory.clearCache()
            usleep(1000)
        }
        #expect(paused == uninterrupted)
    }

    @Test func thePersonPausesAndGoesOn() async throws {
        try await train()
        controller.pause()
        #expect(controller.pauseWanted)
        try await reach(.paused(.user))
        let steps = controller.log.steps.count
        try await Task.sleep(for: .milliseconds(200))
        #expect(controller.log.steps.count == steps, "it trains in a pause")
        controller.resume()
        try await reach(.training)
        try await wait("no step") { controller.log.steps.count > steps }
        try await end()
        #expect(try events() == ["pause: Paused by hand.", "resume: Training continues."])
        #expect(controller.log.events.count == 2)
    }

    @Test func leavingTheAppPausesUntilItIsInFrontAgain() async throws {
        try await train()
        monitor.scene = .inactive
        monitor.scene = .background
        try await reach(.paused(.away))
        monitor.scene = .inactive
        monitor.scene = .active
        try await reach(.training)
        try await end()
        #expect(try events().count == 2)
    }

    @Test func theBlockInProgressEndsBeforeTheAppIsInTheBackground() async throws {
        try await train()
        monitor.scene = .background  // returns only when the training thread waits
        let log = folder.appendingPathComponent("run/metrics.jsonl")
        let size = try Data(contentsOf: log).count
        try await Task.sleep(for: .milliseconds(300))
        #expect(try Data(contentsOf: log).count == size)
        monitor.scene = .active
        try await end()
    }

    @Test(arguments: [ThermalState.serious, .critical]) func heatPauses(_ state: ThermalState) async throws {
        try await train()
        monitor.thermalState = state
        try await reach(.paused(.heat))
        monitor.thermalState = .fair
        try await reach(.training)
        try await end()
    }

    @Test func aLowBatteryPausesUnlessItCharges() async throws {
        try await train()
        monitor.battery = Battery(level: 0.19, isCharging: true)
        monitor.battery = nil
        monitor.thermalState = .fair
        try await Task.sleep(for: .milliseconds(100))
        #expect(controller.state == .training)
        monitor.battery = Battery(level: 0.19, isCharging: false)
        try await reach(.paused(.battery))
        monitor.battery = Battery(level: 0.19, isCharging: true)
        try await reach(.training)
        try await end()
    }

    @Test func aMemoryWarningPausesUntilThePhoneHasMemoryAgain() async throws {
        let ballast = [UInt8](repeating: 1, count: 50_000_000)
        defer { withExtendedLifetime(ballast) {} }
        try await train()
        monitor.availableMemory = 0
        monitor.tell(.memoryWarning)
        try await reach(.paused(.memory))
        try await wait("nobody waits") { clock.sleeps == 1 }
        clock.advance(by: RunController.memoryPause)
        try await wait("it does not look again") { clock.sleeps == 2 }
        #expect(controller.state == .paused(.memory), "the phone has no memory yet")
        monitor.availableMemory = 1_000_000_000
        clock.advance(by: RunController.memoryPause)
        try await reach(.training)
        try await wait("it goes on with the same plan") {
            controller.log.events.contains { $0.name == "cheaper_plan" }
        }
        try await end()
    }

    @Test func aSecondMemoryWarningStartsThePauseAgain() async throws {
        try await train()
        monitor.tell(.memoryWarning)
        try await reach(.paused(.memory))
        try await wait("nobody waits") { clock.sleeps == 1 }
        clock.advance(by: RunController.memoryPause * 0.6)
        monitor.tell(.memoryWarning)
        try await wait("nobody waits") { clock.sleeps == 2 }
        clock.advance(by: RunController.memoryPause * 0.6)
        try await Task.sleep(for: .milliseconds(100))
        #expect(controller.state == .paused(.memory))
        clock.advance(by: RunController.memoryPause * 0.6)
        try await reach(.training)
        try await end()
    }

    @Test func otherWorkHasEndedWhenItsCallerGoesOn() async throws {
        let hasEnded = Locked(false)
        await controller.doOther { gate in
            _ = gate.start("other", sending: Int.self) { _ in
                Thread.sleep(forTimeInterval: 0.2)
                hasEnded.change { $0 = true }
            }
        }
        #expect(hasEnded.value)
    }

    @Test func theNextReasonTakesThePlaceOfOneThatIsOver() async throws {
        try await train()
        controller.pause()
        monitor.thermalState = .serious
        try await reach(.paused(.user))
        controller.resume()
        try await reach(.paused(.heat))
        monitor.scene = .background
        try await reach(.paused(.away))
        monitor.thermalState = .nominal
        monitor.scene = .active
        try await reach(.training)
        try await end()
        #expect(
            try events().map { String($0.prefix { $0 != "." }) } == [
                "pause: Paused by hand", "pause: The device is too warm",
                "pause: The app is not in front, and iOS gives it no time to train", "resume: Training continues",
            ])
    }

    @Test func aReasonFromBeforeTheStartPausesAtTheFirstBlock() async throws {
        monitor.thermalState = .critical
        controller.start(try settings())
        try await reach(.paused(.heat))
        #expect(controller.log.steps.isEmpty)
        monitor.thermalState = .nominal
        try await reach(.training)
        try await end()
    }

    @Test func stopsInAPause() async throws {
        try await train()
        controller.pause()
        try await reach(.paused(.user))
        try await end()
        #expect(folder.appendingPathComponent("run/adapters").exists, "what it learned is saved")
    }

    /// A run on a GPU, which iOS refuses in the background, ends at its last saved state.
    @Test(arguments: [Backend.cpu, .gpu]) func stopsInTheBackground(_ device: Backend) async throws {
        Device.gpuIsSimulated = true
        defer { Device.gpuIsSimulated = false }
        var settings = try settings()
        // A GPU's functions do not run on the CPU.
        let bundle = try copyWithoutFunctions(URL(fileURLWithPath: settings.bundle))
        (settings.bundle, settings.device) = (bundle.path, device)
        controller.start(settings)
        try await wait("no step") { controller.log.lastStep > 0 || !controller.isRunning }
        monitor.scene = .background
        try await reach(.paused(.away))
        try await end()
        #expect(folder.appendingPathComponent("run/adapters").exists == (device == .cpu))
        #expect((controller.log.end?.step == 0) == (device == .gpu))
    }

    @Test func theLogSaysWhatTheRunTookOfTheBattery() async throws {
        try await train()
        monitor.battery?.level = 0.75
        try await end()
        let log = try LogSummary(folder: folder.appendingPathComponent("run"))
        #expect(log.start?.battery == Battery(level: 0.8, isCharging: false))
        #expect(log.end?.battery == Battery(level: 0.75, isCharging: false))
        #expect(log.start?.thermalState == "nominal" && log.end?.thermalState == "nominal")
        #expect(abs((log.batteryUsed ?? 0) - 0.05) < 1e-6)
        var charged = log
        charged.end?.battery?.isCharging = true
        #expect(charged.batteryUsed == nil)
    }

    @Test func startsAgainAfterTheEnd() async throws {
        controller.start(try settings("first", steps: 2))
        try await reach(.finished(.finished))
        controller.start(try settings("second", steps: 3))
        try await reach(.finished(.finished))
        #expect(controller.log.steps.count == 3)
    }

    @Test func leavesARunInProgressAlone() async throws {
        try await train()
        controller.start(try settings("other", steps: 1))
        #expect(controller.settings?.output.hasSuffix("run") == true)
        try await end()
        #expect(!folder.appendingPathComponent("other").exists)
    }

    @Test func aRunThatCannotBeginFailsWithItsSentence() async throws {
        var settings = try settings()
        settings.bundle = "/nowhere"
        controller.start(settings)
        try await wait("it goes on") { !controller.isRunning }
        #expect(
            controller.state == .failed("/nowhere is not a bundle: it has no manifest.json. Make one with mesp-export.")
        )
        controller.start(try self.settings(steps: 1))
        try await reach(.finished(.finished))
    }

    @Test func aRunThatDivergesFails() async throws {
        var settings = try settings()
        settings.learningRate = 1e30
        controller.start(settings)
        try await wait("it goes on") { !controller.isRunning }
        guard case .failed(let sentence) = controller.state else {
            Issue.record("\(controller.state)")
            return
        }
        #expect(sentence.english.contains("start again with a lower learning rate"))
        #expect(controller.log.end?.reason == .failed)
    }
}
