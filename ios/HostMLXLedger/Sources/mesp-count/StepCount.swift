import Foundation
import HostMLXLedger

@testable import MeSPBundle
@testable import MeSPCore
@testable import MeSPSelfCheck
@testable import MeSPSentences

/// The costs on a phone of a step with a bundle for the GPU, counted without a GPU. See docs/ledger.md.
struct StepCount: Encodable {
    let type = "count"
    let evals, kernels, readBytes, writtenBytes, newBuffers, newBufferBytes: Int
    let tflop: Double
    let modelledSeconds: Double
    /// The peak memory of MLX's arrays and its cache, and the planner's prediction of that peak. Both leave out mapped weights and other memory of
    /// the process. The command buffers have MLX's default sizes, and arrays are freed when their command buffer is complete.
    let ledgerPeakBytes, predictedPeakBytes: Int
    /// The number of command buffers, and the number of waits in which `eval` polls. `spinningSeconds` is an upper bound of the time of these waits.
    let commandBuffers, spins: Int
    let spinningSeconds: Double
    /// The same counts with the trainer's command buffers. In `fast` each command buffer is complete at once. In `strict` each command buffer is
    /// complete only when it must be, and the completion handlers of the last one are late. In `slow` the completion handlers of many command buffers
    /// are late.
    let fast, strict, slow: Short
    /// The number of kernels that this step and the one before compile. `mostFirstKernels` is the largest number from one block to the next.
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

    /// - Throws: `MeSPError` as a run does, and for a bundle for the CPU; `LedgerError`.
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

/// Records the second step, because the first one also creates arrays that stay. Returns the ledger and the planner's prediction for its arrays.
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
