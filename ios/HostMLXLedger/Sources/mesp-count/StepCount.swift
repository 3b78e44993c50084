import Foundation
import HostMLXLedger

@testable import MeSPBundle
@testable import MeSPCore
@testable import MeSPSelfCheck
@testable import MeSPSentences

/// The costs of a training step on a phone's GPU, counted without a GPU. See docs/gpu.md.
struct StepCount: Encodable {
    let type = "count"
    let evals, kernels, readBytes, writtenBytes, newBuffers, newBufferBytes: Int
    let tflop: Double
    let modelledSeconds: Double
    /// The peak memory of MLX's arrays and cache in bytes, as the ledger counts it and as the planner predicts it. Both numbers exclude mapped
    /// weights.
    let ledgerPeakBytes, predictedPeakBytes: Int
    let commandBuffers, spins: Int
    let spinningSeconds: Double
    /// Counts by the rules `fastPhone`, `strictPhone` and `slowPhone`, with the trainer's command buffer sizes. The counts above use MLX's default
    /// sizes.
    let fast, strict, slow: Short
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

    init(_ settings: RunSettings) throws {
        var settings = settings
        settings.device = .gpu
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

/// Records the second step, because the first one also creates arrays that stay.
private func record(_ settings: RunSettings, _ rules: LedgerRules) throws -> (Ledger, predicted: Int) {
    var predicted = 0
    let ledger = try Ledger.record(rules: rules) {
        let trial = try TrialSteps(settings)
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
