import Foundation
import MLX
import MeSPControl
import MeSPCore

/// The measurements of the process's first two steps. On a GPU the first step compiles kernels, and Metal takes memory for them.
struct FirstStep {
    /// The growth of the footprint, without MLX's arrays, in bytes: after the first use of MLX, and after the first two steps.
    let afterUse, afterStep: Int
    /// The longest time between two block boundaries, in seconds: in the first step, and in the second step.
    let longest, longestAgain: Double
}

extension CheckSuite {
    private func takeFirstStep() throws -> FirstStep {
        guard isFirstUse else {
            throw Skipped(reason: "MLX was in use before: restart the process, and check before anything else.")
        }
        if let firstStepTaken { return firstStepTaken }
        func grown() -> Int {
            Memory.clearCache()
            return memoryFootprint() - Memory.activeMemory - firstUseOfMLX.footprint
        }
        eval(MLXArray(Float(1)) + 1)
        let afterUse = grown()
        let run = run(longest)
        let (longest, longestAgain) = try longestStretches(run, defaultPlan(run))
        // Mapped weights count as active memory of MLX but not in the footprint, so the maps are released.
        bundle.maps.areKept = false
        let step = FirstStep(afterUse: afterUse, afterStep: grown(), longest: longest, longestAgain: longestAgain)
        firstStepTaken = step
        return step
    }

    private func longestStretches(_ run: RunSettings, _ plan: Plan) throws -> (Double, Double) {
        let trainer = try makeTrainer(run, plan: plan)
        defer { trainer.work.atBlock = {} }
        let stretches = try (0..<2).map { number in
            let clock = ContinuousClock()
            var (longest, last) = (Duration.zero, clock.now)
            trainer.work.atBlock = { [atBlock] in
                longest = max(longest, clock.now - last)
                try atBlock()
                last = clock.now
            }
            _ = try trainer.step([SequenceLoss([example(run.seqLen, number: number)])], number: number)
            return max(longest, clock.now - last) / .seconds(1)
        }
        return (stretches[0], stretches[1])
    }

    /// Measures the growth of the footprint by the first use of MLX and the first two steps, without arrays. Libraries, compiled kernels and command
    /// buffers cause this growth.
    func measureMetalFootprint() throws -> Finding {
        let step = try takeFirstStep()
        let bytes = max(0, step.afterStep)
        constants.metalBytes = Double(bytes)
        MetalMemory[bundle.device] = bytes
        return Finding(
            .note,
            "Besides its arrays MLX adds \(shown(megabytes: bytes)) to the footprint by the end of the first step, \(shown(megabytes: step.afterUse)) of it with the first use.",
            [
                Measurement("before the first use", Double(firstUseOfMLX.footprint), "bytes"),
                Measurement("after the first use", Double(step.afterUse), "bytes"),
                Measurement(SelfCheckReport.afterStep, Double(step.afterStep), "bytes"),
            ])
    }

    /// Checks the longest time between two block boundaries. When the app enters the background, training stops at the next boundary. iOS terminates
    /// an app that takes too long.
    func checkLeaving() throws -> Finding {
        let step = try takeFirstStep()
        let verdict = Self.verdict(leaving: step.longest, onGPU: bundle.device == .gpu)
        let (time, limit) = (String(format: "%.3f", step.longest), String(format: "%.0f", BoundaryGate.secondsToLeave))
        return Finding(
            verdict,
            verdict == .fail
                ? "In the first step \(time) s pass between two boundaries; leaving the app waits for \(limit) s only."
                : "In the first step at most \(time) s pass between two boundaries; leaving the app waits for \(limit) s.",
            [
                Measurement("first step", step.longest, "s"), Measurement("second step", step.longestAgain, "s"),
                Measurement("limit", BoundaryGate.secondsToLeave, "s"),
            ])
    }

    static func verdict(leaving seconds: Double, onGPU: Bool) -> SelfCheckReport.Verdict {
        guard onGPU else { return .note }
        return seconds <= BoundaryGate.secondsToLeave ? .pass : .fail
    }
}
