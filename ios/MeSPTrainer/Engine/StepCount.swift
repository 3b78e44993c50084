#if canImport(HostMLXLedger)
    import Foundation
    import HostMLXLedger
    import MeSPCore

    /// What a step of a bundle for the GPU takes on a phone, counted without one: see docs/ledger.md.
    struct StepCount: Encodable {
        let evals, kernels, readBytes, writtenBytes, newBuffers, newBufferBytes: Int
        let tflop: Double
        /// Of MLX's arrays and its cache, without the process and mapped weights: the ledger's, and the planner's prediction.
        let ledgerPeakBytes, predictedPeakBytes: Int
        let modelledSeconds: Double

        /// - Throws: `MeSPError` as a run would, and of a bundle for the CPU; `LedgerError`.
        init(_ settings: RunSettings) throws {
            var predicted = 0
            let ledger = try Ledger.record {
                let rehearsal = try Rehearsal(settings)
                guard rehearsal.isForGPU else {
                    throw MeSPError("\(settings.bundle) is for the CPU: export it with --device gpu to count.")
                }
                predicted = rehearsal.planner.arrays(rehearsal.plan)
                // The first step also makes what stays.
                try rehearsal.step()
                Ledger.restart()
                try rehearsal.step()
            }
            (evals, kernels, tflop) = (ledger.evals + ledger.waits, ledger.kernels, ledger.flop / 1e12)
            (readBytes, writtenBytes) = (Int(ledger.readBytes), Int(ledger.writtenBytes))
            (newBuffers, newBufferBytes) = (ledger.newBuffers, Int(ledger.newBufferBytes))
            (ledgerPeakBytes, predictedPeakBytes) = (ledger.peakBytes, predicted)
            modelledSeconds = ledger.seconds()
        }
    }
#endif
