import Foundation
import MLX
import MeSPBundle

extension LogRecord.Start {
    init(_ settings: RunSettings, _ bundle: ModelBundle, _ battery: Battery?) {
        let manifest = bundle.manifest
        self.init(
            version: Run.version, mlxVersion: MLXSupport.version, device: bundle.device, host: Self.host,
            model: .init(
                name: manifest.name, id: manifest.model.id, layers: bundle.architecture.numHiddenLayers,
                weights: manifest.weightsDigest),
            settings: settings, battery: battery, thermalState: ThermalState.current.rawValue)
    }

    package static var host: String {
        let system = ProcessInfo.processInfo.operatingSystemVersionString
        var name = utsname()
        uname(&name)
        let machine = withUnsafeBytes(of: &name.machine) { String(decoding: $0.prefix { $0 != 0 }, as: UTF8.self) }
        return "\(machine), \(system)"
    }
}

extension LogRecord.Prediction {
    init(_ settings: RunSettings, _ bundle: ModelBundle, _ planner: Planner, _ plan: Plan, _ data: Splits? = nil) {
        self.init(
            method: settings.method, seqLen: settings.seqLen, rank: settings.rank,
            predictedPeakBytes: planner.peak(plan), leastPeakBytes: planner.leastPeak,
            metalBytes: planner.metalBytes, mappedBytes: bundle.manifest.mappedBytes,
            readWeightBytes: planner.readWeightBytes(plan),
            callsFunctions: !bundle.manifest.functions(of: settings).isEmpty, steps: settings.steps,
            examples: settings.dpClip == nil ? nil : data?.exampleCount)
    }
}
