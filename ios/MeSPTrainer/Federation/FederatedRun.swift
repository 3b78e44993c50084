import Foundation
import MLX
import MeSPAdapters
import MeSPBundle
import MeSPControl
import MeSPCore
import MeSPFiles
import MeSPSentences

/// A device's training run in one round of a federation. The run starts from the adapters in the server's message.
///
/// `docs/federation.md` describes the content of messages, and the shapes of their arrays. An array holds the matrices A, or the matrices B, of one
/// module in all trained blocks that have the module.
package struct FederatedRun {
    /// The settings of the run. They resume an interrupted run for the same message.
    package let settings: RunSettings
    /// The time after which the server no longer accepts the answer.
    package let deadline: ContinuousClock.Instant
    private let question: SuperNode.Question
    private let architecture: Architecture
    private let received: [String: FlowerArray]
    private let isRounded: Bool

    /// Returns the maximum size of a message in bytes: the size of all adapter matrices in float32 at the bundle's largest rank, plus 1 MiB.
    ///
    /// - Throws: `MeSPError` if the URL is not a bundle.
    package static func mostBytes(_ bundle: URL) throws -> Int {
        let manifest = try ModelBundle(url: bundle, checksums: false).manifest
        let layouts = manifest.architecture.layouts(rank: manifest.ranks.max() ?? 0, withExperts: true)
        return layouts.reduce(1 << 20) { $0 + 4 * $1.count }
    }

    /// Reads a message and checks its settings. If no run is resumed, also checks its arrays and saves them as the run's first adapters.
    ///
    /// - Parameters:
    ///   - data: a folder of tokens that `TextData` wrote; nil for the bundle's own text.
    ///   - memoryLimit: the limit of the peak memory footprint, in bytes. The server's limit applies too.
    /// - Throws: `MeSPError` if the message does not ask for a training of this model, or is invalid.
    package init(_ question: SuperNode.Question, bundle: URL, data: URL? = nil, memoryLimit: Int? = nil) throws {
        guard question.type == "train", let config = question.records.configs["config"],
            let received = question.records.arrays["arrays"]
        else { throw MeSPError("The server asks for \(question.type), which this version cannot do.") }
        let manifest = try ModelBundle(url: bundle, checksums: false).manifest
        let model = manifest.model
        let name = [model.id, model.revision].compactMap { $0 }.joined(separator: "@")
        guard config["model"] == .text(name) else {
            throw MeSPError("\(bundle.path) is a bundle of \(name), and the round is for another model.")
        }
        switch config["exchange"] {
        case .text("float32"): isRounded = false
        case .text("bfloat16"): isRounded = true
        default: throw MeSPError("The server exchanges adapters in a way that this version does not know.")
        }
        (self.question, self.received, architecture) = (question, received, manifest.architecture)
        let timeout = number(config["timeout"])
        guard timeout.map({ (0..<Double.infinity).contains($0) }) ?? true else { throw noSetting("timeout") }
        // If this device's clock is slow, the message seems to come from the future. It then counts as created now.
        let age = max(0, -question.created.timeIntervalSinceNow)
        deadline = .now + .seconds(max(0, min((timeout ?? .infinity) - age, 1e9)))
        var settings = try Self.settings(config, bundle, in: question.folder)
        settings.data = data?.path
        if let memoryLimit {
            settings.memoryLimitMb = min(settings.memoryLimitMb ?? .infinity, Double(memoryLimit) / 1e6)
        }
        self.settings = settings
        if !settings.resume { try writeStart() }
    }

    /// Returns the answer: the trained matrices, the loss and other metrics, and the device's name. If the server exchanges bfloat16, the answer has
    /// the changes of the matrices instead of the matrices.
    ///
    /// - Throws: `CancellationError` if the run has not finished; `MeSPError` if a received array is not among the trained matrices.
    package func answer(as name: String? = nil) throws -> FlowerRecords {
        let output = URL(fileURLWithPath: settings.output)
        let summary = try LogSummary(folder: output)
        guard summary.end?.reason == .finished else { throw CancellationError() }
        let adapters = output.appendingPathComponent("adapters")
        let trained = try Safetensors(adapters.appendingPathComponent(AdapterFormat.mlx.file))
        let arrays = try received.map { name, array in
            let new = try matrices(name, array).flatMap { matrix, shape in
                guard let new = trained[matrix], new.shape == shape else {
                    throw MeSPError("The server sent \(name), which the run does not train.")
                }
                return try new.numbers(Float.self)
            }
            return (name, packed(new, from: try numbers(array, isRounded: isRounded), like: array))
        }
        let targets = summary.steps.reduce(0) { $0 + $1.tokens }
        let loss = summary.steps.reduce(0) { $0 + Double($1.loss) } / Double(max(summary.steps.count, 1))
        return FlowerRecords(
            arrays: ["arrays": Dictionary(uniqueKeysWithValues: arrays)],
            metrics: [
                "metrics": [
                    "num-examples": .int(Int64(targets)), "loss": .double(loss),
                    "footprint-bytes": .int(Int64(summary.end?.footprintPeakBytes ?? 0)),
                ]
            ],
            configs: ["about": ["name": .text(name ?? "node \(question.node)")]])
    }

    // MARK: - What the server may ask

    private static func settings(_ config: [String: FlowerValue], _ bundle: URL, in folder: URL) throws -> RunSettings {
        var given = [String: Any]()
        for (name, value) in config where RunSettings.federated.contains(name) {
            switch value {
            case .double(let number) where number.isFinite: given[name] = number
            case .int(let number): given[name] = number
            case .unsigned(let number): given[name] = number
            case .flag(let flag): given[name] = flag
            case .text(let text): given[name] = text
            case .texts(let texts): given[name] = texts
            case .double, .bytes: throw noSetting(name)
            }
        }
        let output = folder.appendingPathComponent("run")
        given["bundle"] = bundle.path
        given["output"] = output.path
        var settings = try RunSettings(json: given, from: "The server's settings are")
        settings.adapters = folder.appendingPathComponent("start").path
        let first = ((number(config["server-round"]) ?? 1) - 1) * Double(settings.steps)
        guard let firstStep = Int(exactly: first) else { throw noSetting("server-round") }
        settings.firstStep = firstStep
        settings.proximalMu = number(config["proximal-mu"]).flatMap { $0 == 0 ? nil : Float($0) }
        settings.valBatches = 0
        try settings.check()
        settings.resume = FileManager.default.fileExists(atPath: LogWriter.url(in: output).path)
        return settings
    }

    private func writeStart() throws {
        let folder = URL(fileURLWithPath: settings.adapters ?? "")
        try makeFolder(folder)
        var tensors = [NewTensor]()
        for (name, array) in received {
            let numbers = try numbers(array, isRounded: isRounded)
            for (index, matrix) in try matrices(name, array).enumerated() {
                let size = matrix.shape.reduce(1, *)
                let part = Array(numbers[index * size..<(index + 1) * size])
                tensors.append(
                    NewTensor(name: matrix.name, shape: matrix.shape, dtype: .float32) { .of(part, matrix.shape) })
            }
        }
        try writeSafetensors(
            tensors, metadata: ["format": "pt"], to: folder.appendingPathComponent(AdapterFormat.mlx.file))
        let config: [String: Any] = [
            "fine_tune_type": "lora", "lora_parameters": ["rank": settings.rank, "scale": Double(settings.scale)],
        ]
        let json = try JSONSerialization.data(withJSONObject: config)
        try writeWhole(folder.appendingPathComponent(AdapterFormat.configFile)) { try $0.write(contentsOf: json) }
    }

    /// Returns the name in mlx-lm and the shape of each matrix in an array. The matrices belong to the last blocks that have the module.
    ///
    /// - Parameter name: the name of the array, such as `self_attn.q_proj.lora_b`.
    private func matrices(_ name: String, _ array: FlowerArray) throws -> [(name: String, shape: [Int])] {
        let found = (0..<architecture.numHiddenLayers).compactMap { index -> (name: String, shape: [Int])? in
            let block = architecture.block(index)
            guard let module = block.trainable.first(where: { name.hasPrefix($0.name + ".lora_") }) else { return nil }
            let (a, b) = block.shapes([module], rank: settings.rank)
            return (
                "\(architecture.mlxPrefix).layers.\(index).\(name)",
                AdapterFormat.mlx.turned(name.hasSuffix("a") ? a : b, name.hasSuffix("a") ? "A" : "B")
            )
        }
        let matrices = found.suffix(array.shape.first ?? 0)
        guard !matrices.isEmpty, matrices.allSatisfy({ array.shape == [matrices.count] + $0.shape }) else {
            throw MeSPError("The server sent \(name), in a form that this model does not have.")
        }
        return Array(matrices)
    }

    /// Returns the array for the answer: the new numbers in float32, or, if `isRounded`, their changes in bfloat16. Rounding the new numbers to
    /// bfloat16 would lose small changes.
    private func packed(_ new: [Float], from old: [Float], like received: FlowerArray) -> FlowerArray {
        var data = Data(capacity: received.data.count)
        for (new, old) in zip(new, old) {
            if isRounded {
                let bits = (new - old).bitPattern
                let rounded = UInt16((bits + 0x7fff + (bits >> 16 & 1)) >> 16)  // to the nearest, ties to even
                withUnsafeBytes(of: rounded.littleEndian) { data.append(contentsOf: $0) }
            } else {
                withUnsafeBytes(of: new.bitPattern.littleEndian) { data.append(contentsOf: $0) }
            }
        }
        return FlowerArray(received.kind, shape: received.shape, data: data)
    }
}

/// Returns the numbers of a received array. If `isRounded`, the array has the bits of bfloat16 as uint16.
private func numbers(_ array: FlowerArray, isRounded: Bool) throws -> [Float] {
    guard array.kind == (isRounded ? .uint16 : .float32) else {
        throw MeSPError("The server sent matrices in a form other than the one it states.")
    }
    let numbers: [Float] = array.data.withUnsafeBytes { bytes in
        stride(from: 0, to: bytes.count, by: isRounded ? 2 : 4).map { place in
            if isRounded {
                let bits = UInt16(littleEndian: bytes.loadUnaligned(fromByteOffset: place, as: UInt16.self))
                return Float(bitPattern: UInt32(bits) << 16)
            }
            return Float(bitPattern: UInt32(littleEndian: bytes.loadUnaligned(fromByteOffset: place, as: UInt32.self)))
        }
    }
    guard numbers.allSatisfy(\.isFinite) else { throw MeSPError("The server sent a number that is not finite.") }
    return numbers
}

private func noSetting(_ name: String) -> MeSPError { MeSPError("The server sent the unknown setting \(name).") }

private func number(_ value: FlowerValue?) -> Double? {
    switch value {
    case .double(let number): number
    case .int(let number): Double(number)
    case .unsigned(let number): Double(number)
    default: nil
    }
}
