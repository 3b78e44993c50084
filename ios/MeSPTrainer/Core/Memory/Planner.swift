import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

/// The trade-offs of a step between time and memory.
public struct Plan: Codable, Sendable, Equatable {
    /// The approximate size limit of temporary arrays, in bytes.
    package var tileBytes: Int
    /// How many of the last blocks keep their intermediates in memory from the forward to the backward pass, instead of recomputing them (MeSP).
    package var keptBlocks = 0
    package var offload = RunSettings.Offload.none
    /// The order in which a step's sequences go through the model; nil for a step of one sequence.
    package var order: RunSettings.Order?
    /// Whether the block inputs of a pair's rejected answer are kept until its backward pass. If not, the rejected answer runs forward twice.
    package var keepsAnswer = false
    /// The limit of the freed buffers that MLX caches from one block to the next on a GPU, in bytes.
    package var cacheBytes = 0
    package var keepsMaps = false

    func sequences(of settings: RunSettings) -> Int {
        order == .blocks ? settings.sequences : keepsAnswer ? 2 : 1
    }

    /// Returns whether gradients are gathered before the update. This is the case if the update needs all gradients at once, or if the sequences go
    /// through the model one after the other. A method without a backward pass gathers none.
    func gathersGradients(of settings: RunSettings) -> Bool {
        let oneByOne = settings.sequences > 1 && order != .blocks
        return settings.method.hasBackwardPass
            && (oneByOne || settings.maxGradNorm != nil || settings.objective != nil || settings.dpClip != nil)
    }
}

package struct Planner: Sendable {
    let manifest: Manifest
    let settings: RunSettings
    let processorMemory: ProcessorMemory
    typealias Parameters = (count: Int, trained: Int, whole: Int)
    let parameters: [Parameters]
    let magnitudes: Int
    let adaptedInMLP: Int
    /// Sizes in bytes, computed once: of the process, of the parameters with the optimizer's state, and in `kept[n]` of the intermediates of the last n
    /// blocks.
    private(set) var (process, vectors, kept) = (0, 0, [0])
    /// The memory that the system allows the process, in bytes; nil without a limit.
    let systemLimit: Int?

    package init(_ manifest: Manifest, _ settings: RunSettings, systemLimit: Int? = systemMemoryLimit()) {
        (self.manifest, self.settings, self.systemLimit) = (manifest, settings, systemLimit)
        processorMemory = settings.processor.memory
        let layouts = settings.layouts(of: manifest.architecture)
        parameters = layouts.map { ($0.count, $0.trainedCount, $0.whole.count) }
        magnitudes = layouts.reduce(0) { $0 + $1.magnitudes }
        let adapted = Set(layouts.flatMap { $0.modules.flatMap(\.projections) })
        let ofMLPs: [Set<Projection>] = [[.gate, .up, .down], [.expertGate, .expertUp, .expertDown]]
        adaptedInMLP = ofMLPs.map { adapted.intersection($0).count }.max() ?? 0
        (process, vectors) = (processBytes, vectorBytes)
        for block in parameters.indices.reversed() {
            kept.append(kept[kept.count - 1] + intermediates(of: architecture.block(block)))
        }
    }

    var architecture: Architecture { manifest.architecture }
    var length: Int { settings.seqLen }
    var method: GradientMethod { settings.method }
    var trainedBlocks: Int { parameters.count - (parameters.firstIndex { $0.count > 0 } ?? parameters.count) }

    var tileSizes: [Int] {
        Schedule.choices(settings.processor, hiddenSize: architecture.hiddenSize, length: length)
    }

    /// Returns the fastest plan within `memoryLimitMb` and the system's limit. Without `memoryLimitMb`, returns a plan that keeps no intermediates
    /// and has the largest tiles, if the system's limit allows this. Arrays go into files only if no other plan stays within the limits, or if the
    /// setting `offload` demands it.
    ///
    /// - Throws: `MeSPError` if no plan stays within the limits. The message names the lowest possible limit.
    package func plan() throws -> Plan {
        let asked = settings.memoryLimitMb.map { Int(whole: $0 * 1e6) }
        var plan = try plan(within: asked)
        let roomForMaps = processorMemory.roomForMaps(after: withMargin(peak(plan)), limit: asked, room: room)
        plan.keepsMaps = manifest.mappedBytes <= roomForMaps
        return plan
    }

    private var room: Int { min(systemLimit ?? .max, Int(ProcessInfo.processInfo.physicalMemory)) }

    private func plan(within asked: Int?) throws -> Plan {
        let offload = settings.offload ?? .none
        let standard = orders.flatMap { orders in
            ordered(
                Plan(tileBytes: tileSizes[0], offload: offload, keepsAnswer: keepingAnswers(offload).last ?? false),
                orders)
        }
        if asked == nil, let plan = standard.first(where: { withMargin(peak($0)) <= systemLimit ?? .max }) {
            return plan
        }
        let limit = min(asked ?? .max, systemLimit ?? .max)
        if let plan = plans.first(where: { withMargin(peak($0)) <= limit }) { return plan }
        let (subject, remedy): (Sentence, Sentence) =
            limit == asked
            ? ("A memory limit of \(rounded(limit)) MB is too low", "raise it")
            : ("The system allows this process \(rounded(limit)) MB, which is too little", "allow it more")
        throw MeSPError(
            "\(subject): sequences of \(length) tokens at rank \(settings.rank) need at least \(rounded(leastPeak)) MB; \(remedy) or take shorter sequences, or fewer in a step.",
            .insufficientMemory(required: leastPeak, available: limit))
    }

    /// Returns the fastest of the plans that take at least 1% less memory than `plan`, or else the plan with the least memory.
    package func cheaper(than plan: Plan) -> Plan? {
        let (limit, plans) = (peak(plan), plans)
        let least = plans.min { peak($0) < peak($1) }.flatMap { peak($0) < limit ? $0 : nil }
        guard var cheaper = plans.first(where: { peak($0) <= limit - limit / 100 }) ?? least else { return nil }
        cheaper.keepsMaps = plan.keepsMaps && processorMemory.mapsAreClean
        return cheaper
    }

    private var plans: [Plan] {
        let maxKept = method.readsIntermediates ? trainedBlocks : 0
        return offloads.flatMap { offload in
            orders.flatMap { orders in
                tileSizes.flatMap { tileBytes in
                    keepingAnswers(offload).flatMap { keepsAnswer in
                        (0...maxKept).reversed().flatMap {
                            ordered(
                                Plan(
                                    tileBytes: tileBytes, keptBlocks: $0, offload: offload, keepsAnswer: keepsAnswer),
                                orders)
                        }
                    }
                }
            }
        }
    }

    // MARK: - The order of a step's sequences

    /// The orders to choose from, the faster first. Orders in one group are equally fast. Of these, the planner takes the one with less memory.
    private var orders: [[RunSettings.Order?]] {
        guard settings.sequences > 1 else { return [[nil]] }
        guard method.hasBackwardPass, settings.objective == nil, settings.dpClip == nil,
            settings.sequences <= maxTogether
        else {
            return [[.sequences]]
        }
        if let order = settings.order { return [[order]] }
        let plan = Plan(tileBytes: tileSizes[0], offload: settings.offload ?? .none, order: .sequences)
        return withMargin(peak(plan)) + manifest.mappedBytes <= room
            ? [[.blocks, .sequences]] : [[.blocks], [.sequences]]
    }

    /// The maximum number of sequences that may go through the blocks together without an integer overflow in the planner.
    private var maxTogether: Int {
        let bytes = kept[trainedBlocks] + (trainedBlocks + 1) * hidden + context + sharedSums
        return min(RunSettings.maxSequences, (1 << 60) / bytes)
    }

    func isPossible(_ plan: Plan) -> Bool {
        (1...(1 << 30)).contains(plan.tileBytes) && (0...(1 << 40)).contains(plan.cacheBytes)
            && (0...(method.readsIntermediates ? trainedBlocks : 0)).contains(plan.keptBlocks)
            && (plan.order != .blocks || orders.joined().contains(.blocks))
            && (!plan.keepsAnswer || keepingAnswers(plan.offload).contains(true))
    }

    private func ordered(_ plan: Plan, _ orders: [RunSettings.Order?]) -> [Plan] {
        let plans = orders.map { order in
            var plan = plan
            plan.order = order
            return plan
        }
        return plans.filter(fits).min { peak($0) < peak($1) }.map { [$0] } ?? []
    }

    /// Returns whether a plan with the order `blocks` is reasonable: its peak is within `room`, and block inputs on disk take no more bytes than the
    /// mapped weights. Always true for other orders, and if the settings name the order.
    private func fits(_ plan: Plan) -> Bool {
        guard plan.order == .blocks, settings.order == nil else { return true }
        return withMargin(peak(plan)) <= room
            && (plan.offload == .none || settings.sequences * trainedBlocks * hidden <= manifest.mappedBytes)
    }

    /// Returns the bytes of weights that a step reads; nil with an objective or `blocksPerStep`, with which the number varies.
    func readWeightBytes(_ plan: Plan) -> Int? {
        guard settings.objective == nil, settings.blocksPerStep == nil else { return nil }
        let first = method.hasBackwardPass ? architecture.numHiddenLayers - trainedBlocks : 0
        let passes = method.hasBackwardPass ? 2 : 1
        let blocks = manifest.blocks.reduce(0) { sum, kind in
            sum + kind.words * (kind.layers.count + kind.layers.count { $0 >= first })
        }
        let words = blocks + (manifest.perLayerProjection?.words ?? 0) * passes + manifest.head.words * (3 - passes)
        let (bytes, overflow) = (4 * words).multipliedReportingOverflow(
            by: plan.order == .blocks ? 1 : settings.sequences)
        return overflow ? .max : bytes
    }

    private func keepingAnswers(_ offload: RunSettings.Offload) -> [Bool] {
        guard settings.objective?.takesPairs == true, method.hasBackwardPass else { return [false] }
        return offload == .none ? [true, false] : [true]
    }

    private var offloads: [RunSettings.Offload] {
        if let choice = settings.offload { return [choice] }
        return method.hasBackwardPass ? [.none, .inputs, .all] : [.none, .all]
    }

    package var leastPeak: Int { withMargin(plans.map(peak).min() ?? 0) }

    private func withMargin(_ bytes: Int) -> Int { bytes + bytes / 100 * Self.marginPercent }
}

private func rounded(_ bytes: Int) -> Int { (bytes + 999_999) / 1_000_000 }
