import Foundation
import HostMLXLedger

@testable import MeSPBundle
@testable import MeSPCore
@testable import MeSPSelfCheck
@testable import MeSPSentences

/// The cost of a step of a bundle for the GPU on a phone, counted without one: see docs/ledger.md.
struct StepCount: Encodable {
    let type = "count"
    let evals, kernels, readBytes, writtenBytes, newBuffers, newBufferBytes: Int
    let tflop: Double
    let modelledSeconds: Double
    /// With MLX's own command buffers, whose arrays go as they are complete: MLX's arrays and its cache, without the process and mapped
    /// weights, and the planner's prediction for them.
    let ledgerPeakBytes, predictedPeakBytes: Int
    /// The number of times that `eval` polls instead of sleeping, and an upper bound of the seconds.
    let commandBuffers, spins: Int
    let spinningSeconds: Double
    /// The same with the trainer's command buffers. In `fast` each is complete at once. In `strict` each is complete when it must be,
    /// and the last one's handlers are late. In `slow` those of many are late.
    let fast, strict, slow: Short
    /// Kernels that the steps before and this one compile, and the most from one block to the next.
    let firstKernels, mostFirstKernels: Int

    struct Short: Encodable {
        let ledgerPeakBytes, predictedPeakBytes, commandBuffers, mostInFlight, spins: Int
        let spinningSeconds: Double

        init(_ settings: RunSettings, _ rules: LedgerRules) throws {
            let (ledger, predicted) = try record(settings, rules)
            (ledgerPeakBytes, predictedPeakBytes) = (ledger.peakBytes, predicted)
            (commandBuffers, mostInFlight) = (ledger.commandBuffers, ledger.mostInFlight)
            (spins, spinningSeconds) = (ledger.spins, ledger.secondsSpinning())
        }
    }

    /// - Throws: `MeSPError` as a run would, and of a bundle for the CPU; `LedgerError`.
    init(_ settings: RunSettings) throws {
        setenv(MLXSupport.commandBufferVariable, "\(LedgerRules.phone.operationsPerBuffer)", 1)
        let (ledger, predicted) = try record(settings, .phone)
        (evals, kernels, tflop) = (ledger.evals + ledger.waits, ledger.kernels, ledger.flop / 1e12)
        (readBytes, writtenBytes) = (Int(ledger.readBytes), Int(ledger.writtenBytes))
        (newBuffers, newBufferBytes) = (ledger.newBuffers, Int(ledger.newBufferBytes))
        modelledSeconds = ledger.seconds()
        (ledgerPeakBytes, predictedPeakBytes) = (ledger.peakBytes, predicted)
        (commandBuffers, spins, spinningSeconds) = (ledger.commandBuffers, ledger.spins, ledger.secondsSpinning())

        unsetenv(MLXSupport.commandBufferVariable)
        MLXSupport.setEnvironment()
        fast = try Short(settings, .fastPhone)
        strict = try Short(settings, .strictPhone)
        slow = try Short(settings, .slowPhone)
        (firstKernels, mostFirstKernels) = (ledger.firstKernels, ledger.mostFirstKernels)
    }
}

/// Records the second step, as the first also makes what stays, and returns the planner's prediction for its arrays too.
private func record(_ settings: RunSettings, _ rules: LedgerRules) throws -> (Ledger, predicted: Int) {
    var predicted = 0
    let ledger = try Ledger.record(rules: rules) {
        let trial = try TrialSteps(settings)
        guard trial.isForGPU else {
            throw MeSPError("\(settings.bundle) is for the CPU: export it with --device gpu to count.")
        }
        guard !trial.hasExperts else {
            throw MeSPError("\(settings.bundle) mixes experts, and kernels depend on those that tokens choose.")
        }
        predicted = trial.planner.arrays(trial.plan)
        try trial.step { Ledger.boundary() }
        Ledger.restart()
        try trial.step { Ledger.boundary() }
    }
    return (ledger, predicted)
}
