import Foundation
import MLX
import MeSPCore

private struct Steps {
    static var phases: [(name: String, path: KeyPath<StepWork.Phases, Double>)] {
        [("forward", \.forward), ("head", \.loss), ("backward", \.backward)]
    }

    /// The seconds of each phase, for each of the first 1000 steps.
    var seconds = [[Double]]()
    /// The maximum growth of the footprint in each phase, in bytes. `mlx` is MLX's maximum active memory in each phase.
    var footprint = [0, 0, 0]
    var mlx = [0, 0, 0]

    var first: [Double] { seconds.first ?? [] }
    var usual: [Double] {
        let later = seconds.dropFirst()
        return Self.phases.indices.map { phase in
            let times = later.map { $0[phase] }.sorted()
            return times.isEmpty ? .nan : times[times.count / 2]
        }
    }
}

extension CheckSuite {
    private func runSteps(_ run: RunSettings, _ plan: Plan, for seconds: Double, watch: ([Double]) -> Void = { _ in })
        throws
        -> Steps
    {
        Memory.clearCache()
        let before = memoryFootprint()
        let trainer = try makeTrainer(run, plan: plan)
        let (clock, sampler) = (trainer.work, FootprintSampler())
        defer { sampler.stop() }
        var steps = Steps()
        var last = clock.time
        var (footprint, mlx) = (0, 0)

        /// Assigns the peaks since the last boundary to the phase whose time has grown.
        func observe() {
            (footprint, mlx) = (max(footprint, sampler.takePeak() - before), max(mlx, Memory.peakMemory))
            Memory.peakMemory = 0
            let now = clock.time
            guard let phase = Steps.phases.firstIndex(where: { now[keyPath: $0.path] > last[keyPath: $0.path] }) else {
                return
            }
            steps.footprint[phase] = max(steps.footprint[phase], footprint)
            steps.mlx[phase] = max(steps.mlx[phase], mlx)
            (footprint, mlx, last) = (0, 0, now)
        }
        clock.atBlock = { [atBlock] in
            observe()
            try atBlock()
        }
        let end = ContinuousClock.now + .seconds(seconds)
        var number = 0
        _ = sampler.takePeak()
        Memory.peakMemory = 0
        while number < 2 || ContinuousClock.now < end {
            let start = clock.time
            _ = try trainer.step([SequenceLoss([example(run.seqLen, number: number)])], number: number)
            observe()
            let times = Steps.phases.map { clock.time[keyPath: $0.path] - start[keyPath: $0.path] }
            if steps.seconds.count < 1000 { steps.seconds.append(times) }
            watch(times)
            number += 1
        }
        clock.atBlock = {}
        return steps
    }

    func measurePeak(_ length: Int) throws -> Finding {
        let run = run(length)
        let plan = try defaultPlan(run)
        // The memory for Metal is in use before this check begins, so the measured growth excludes it.
        let planner = Planner(bundle.manifest, run)
        let predicted = planner.peak(plan) - (planner.metalBytes ?? 0)
        let steps = try runSteps(run, plan, for: 0)
        let highest = steps.footprint.max() ?? 0
        let isKept = highest <= predicted + predicted / 100 * 8
        let measured = Steps.phases.enumerated().flatMap { index, phase in
            [
                Measurement("\(phase.name) footprint", Double(steps.footprint[index]), "bytes"),
                Measurement("\(phase.name) MLX", Double(steps.mlx[index]), "bytes"),
            ]
        }
        return Finding(
            isKept ? .pass : .fail,
            "A step of \(length) tokens adds \(shown(megabytes: highest)) to the footprint; the prediction, with the process, is \(shown(megabytes: predicted)).",
            [Measurement("predicted", Double(predicted), "bytes")] + measured)
    }

    /// Measures the phases with several plans: the default plan, the fastest plans within three memory limits, and on a GPU the default plan with
    /// MLX's cache kept.
    func measureTimes(_ length: Int) throws -> Finding {
        let run = run(length)
        let plan = try defaultPlan(run)
        let planner = Planner(bundle.manifest, run)
        func fastest(within bytes: Int) -> Plan? {
            var run = run
            run.memoryLimitMb = Double(bytes) / 1e6
            return try? Planner(bundle.manifest, run).plan()
        }
        let (least, usual) = (planner.leastPeak, planner.peak(plan))
        let candidates = [
            ("default", plan), ("twice", fastest(within: 2 * usual)), ("half", fastest(within: (least + usual) / 2)),
            ("least", fastest(within: least + 1000)),
            ("cache kept", bundle.backend == .gpu ? planner.keepingCache(plan) : nil),
        ]
        var (seen, measured) = ([Plan](), [Measurement]())
        var defaultSeconds = 0.0
        for case (let name, let candidate?) in candidates where !seen.contains(candidate) {
            seen.append(candidate)
            let steps = try runSteps(run, candidate, for: settings.seconds)
            if name == "default" { defaultSeconds = steps.usual.reduce(0, +) }
            measured.append(Measurement("\(name): first step", steps.first.reduce(0, +), "s"))
            measured += zip(Steps.phases, steps.usual).map { Measurement("\(name): \($0.name)", $1, "s") }
            measured.append(Measurement("\(name): footprint", Double(steps.footprint.max() ?? 0), "bytes"))
        }
        return Finding(
            .note,
            "A step of \(length) tokens takes \(String(format: "%.3f", defaultSeconds)) s with the default plan; \(seen.count) plans were measured.",
            measured)
    }

    /// Compares the speed at the end of a long run with the speed at its beginning. Each speed is measured over a minute, or over a tenth of a run
    /// that is shorter than ten minutes.
    func measureThrottling() throws -> Finding {
        guard settings.minutes > 0 else { throw Skipped(reason: "No long run was requested; set minutes.") }
        let run = run(longest)
        let (state, whole) = (ThermalState.current, settings.minutes * 60)
        let part = min(60, whole / 10)
        var (first, last) = ([Double](), [Double]())
        var hottest = state
        let begin = ContinuousClock.now
        _ = try runSteps(run, defaultPlan(run), for: whole) { times in
            let (time, since) = (times.reduce(0, +), (ContinuousClock.now - begin) / .seconds(1))
            if since <= part || first.count < 2 { first.append(time) }
            if since >= whole - part || last.isEmpty { last.append(time) }
            let order = ThermalState.allCases
            hottest =
                [hottest, .current].max {
                    (order.firstIndex(of: $0) ?? 0) < (order.firstIndex(of: $1) ?? 0)
                } ?? hottest
        }
        func middle(_ times: [Double]) -> Double { times.sorted()[times.count / 2] }
        let ratio = middle(last) / middle(first)
        return Finding(
            .note,
            "After \(String(format: "%.1f", settings.minutes)) minutes a step takes \(String(format: "%.2f", ratio)) times as long; the thermal state went from \(state.rawValue) to \(hottest.rawValue).",
            [
                Measurement("first", middle(first), "s"), Measurement("last", middle(last), "s"),
                Measurement("ratio", ratio),
            ])
    }
}
