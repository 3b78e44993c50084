// The commands of mesp-engine:
//
// - SETTINGS.json runs one training, for mesp train, and prints the log's records as they are written.
// - federate SETTINGS.json takes part in a federation until a signal arrives, and prints a record for each event.
// - generate SETTINGS.json continues a prompt, for mesp generate, and prints a record for each token.
// - evaluate SETTINGS.json reads requests from standard input, for mesp evaluate, and prints records with the results.
// - import SETTINGS.json converts a model in MLX's format into a bundle, and prints progress records.
// - self-check SETTINGS.json checks the machine, for tools/check_gpu.py, and prints a record for each check.
// - --version prints the versions of the engine and of MLX.

import Foundation
import MeSPAdapters
import MeSPBundle
import MeSPCore
import MeSPFiles
import MeSPImport
import MeSPSelfCheck
import MeSPSentences

#if MESP_HOST_MLX && os(Linux)
    import MLX
#endif

// Set by a signal, or if nothing reads the output. The computation checks this flag at every block.
nonisolated(unsafe) var stopRequested: sig_atomic_t = 0
// Set by SIGUSR1 or by a memory warning of the system. The training checks this flag before each step.
nonisolated(unsafe) var memoryIsShort: sig_atomic_t = 0
// The message is allocated here, because a signal handler must not allocate memory.
nonisolated(unsafe) let lostFile = strdup(
    "A file of the bundle became shorter or unreadable while it was in use; copy or export the bundle again. The last saved state is kept.\n"
)

for number in [SIGINT, SIGTERM, SIGHUP] {
    // A signal that the parent process (such as nohup) ignores stays ignored.
    let previous = signal(number) { _ in stopRequested = 1 }
    if unsafeBitCast(previous, to: Int.self) == unsafeBitCast(SIG_IGN, to: Int.self) { signal(number, SIG_IGN) }
}
signal(SIGUSR1) { _ in memoryIsShort = 1 }
signal(SIGBUS) { _ in
    if let lostFile { _ = write(STDERR_FILENO, lostFile, strlen(lostFile)) }
    _exit(2)
}
// When these signals are ignored, a write beyond the file size limit or to a closed pipe fails with an error. Otherwise it would end the process.
signal(SIGXFSZ, SIG_IGN)
signal(SIGPIPE, SIG_IGN)

#if canImport(Darwin)
    let pressure = DispatchSource.makeMemoryPressureSource(eventMask: [.warning, .critical], queue: .global())
    // Without @Sendable the closure would be isolated to the main actor and would trap on the queue.
    pressure.setEventHandler { @Sendable in memoryIsShort = 1 }
    pressure.activate()
#endif

/// Ends the process without running destructors. MLX's threads may still use objects that `exit` would destroy.
func leave(_ status: Int32) -> Never {
    fflush(nil)
    _exit(status)
}

func fail(_ message: String) -> Never {
    FileHandle.standardError.write(Data((message + "\n").utf8))
    leave(2)
}

// MLX reads these variables at its first use.
MLXSupport.setEnvironment()

func checkStop() throws { if stopRequested != 0 { throw CancellationError() } }

func train(_ file: URL) throws {
    let settings = try RunSettings(contentsOf: file)
    #if MESP_HOST_MLX && os(Linux)
        // A dry run computes nothing, so it needs no GPU.
        if settings.dryRun {
            Stream.makeForMissingGPU()
            return try Device.withDefaultDevice(Device(.gpu)) { try run(settings) }
        }
    #endif
    try run(settings)
}

func run(_ settings: RunSettings) throws {
    try Run.run(
        settings,
        report: { _, line in
            // If nothing reads the output, the run stops as after a signal.
            do { try FileHandle.standardOutput.write(contentsOf: line) } catch { stopRequested = 1 }
        },
        atBlock: { _ in try checkStop() },
        memoryIsShort: {
            defer { memoryIsShort = 0 }
            return memoryIsShort != 0
        },
        reward: reward)
}

/// Prints the answers, and reads their rewards from standard input. The parent process computes the rewards.
func reward(_ groups: [AnswerGroup]) throws -> [[Float]] {
    // If the parent process has ended, the run stops and saves its state.
    do { try print("samples", ["groups": groups]) } catch { throw CancellationError() }
    guard let line = readLine() else { throw CancellationError() }
    guard let rewards = try? JSONDecoder().decode([[Float]].self, from: Data(line.utf8)) else {
        throw MeSPError("The rewards of the answers are not lists of numbers.")
    }
    return rewards
}

func openModel(_ file: URL) throws -> Evaluator {
    struct Settings: Decodable {
        struct Adapters: Decodable {
            let folder: String
            let weight: Float
        }
        let bundle: String
        let device: Backend?
        let adapters: [Adapters]
        let images: Images?

        struct Images: Decodable {
            let file: String
            let dtype: ElementType
        }
    }
    let settings: Settings = try readSettings(file)
    let bundle = try ModelBundle(url: URL(fileURLWithPath: settings.bundle), device: settings.device)
    let images = try settings.images.map { images in
        guard let rows = regularFile(URL(fileURLWithPath: images.file)) else {
            throw MeSPError("\(images.file) is not a file.")
        }
        return try bundle.rows(rows, images.dtype)
    }
    return try Evaluator(
        bundle, adapters: settings.adapters.map { .init(URL(fileURLWithPath: $0.folder), weight: $0.weight) },
        images: images)
}

func generate(_ file: URL) throws {
    let request: Generator.Request = try readSettings(file)
    let summary = try openModel(file).generator.generate(
        request, atBlock: checkStop, onToken: { try print("token", ["token": $0]) })
    try print("end", summary)
}

func evaluate(_ file: URL) throws {
    struct Choices: Encodable {
        let logLikelihoods: [Double]
        let greedy: [Bool]
    }
    let evaluator = try openModel(file)
    var count = 0
    while let line = readLine() {
        count += 1
        switch try EvaluationRequest(line: line, number: count) {
        case .choices(let request):
            let scores = try evaluator.scores(of: request.choices, after: request.prompt, atBlock: checkStop)
            try print("choices", Choices(logLikelihoods: scores.map(\.logLikelihood), greedy: scores.map(\.isGreedy)))
        case .text(let request):
            let sum = try evaluator.logLikelihood(of: request.tokens, window: request.window, atBlock: checkStop)
            try print("text", ["log_likelihood": sum])
        case .divergence(let request):
            let sum = try evaluator.divergence(of: request.tokens, window: request.window, atBlock: checkStop)
            try print("divergence", ["kl": sum])
        case .generate(let request):
            try evaluator.generator.generate(
                request.requests, atOnce: request.atOnce, atBlock: checkStop,
                onToken: { index, token in
                    try print("token", ["index": index, "token": token])
                    if readLine() != "true" { throw CancellationError() }
                },
                onEnd: { index, summary in
                    try checkStop()
                    try print("generated", JoinedObject(["index": index], summary))
                })
        }
    }
    try print("end", ["requests": count])
}

func importModel(_ file: URL) throws {
    struct Settings: Decodable {
        let model: String
        let bundle: String
        let id: String?
        let revision: String?
    }
    struct Model: Encodable {
        let name: String
        let modelType: String
        let bytes: Int
        let notices: [String]
    }
    struct End: Encodable {
        let bytes: Int
        let keptBytes: Int
        let seconds: Double
        let footprintPeakBytes: Int
    }
    let settings: Settings = try readSettings(file)
    let start = ContinuousClock.now
    let model = try ModelImport(
        model: URL(fileURLWithPath: settings.model), id: settings.id, revision: settings.revision)
    let manifest = model.manifest
    try print(
        "model",
        Model(
            name: manifest.name, modelType: manifest.architecture.modelType, bytes: model.size,
            notices: model.notices.map(\.english)))
    var (keptBytes, peak) = (0, memoryFootprint())
    try model.write(to: URL(fileURLWithPath: settings.bundle)) { bytes, kept in
        try checkStop()
        (keptBytes, peak) = (kept, max(peak, memoryFootprint()))
        try print("progress", ["bytes": bytes])
    }
    let seconds = (ContinuousClock.now - start) / .seconds(1)
    try print("end", End(bytes: model.size, keptBytes: keptBytes, seconds: seconds, footprintPeakBytes: peak))
}

func checkMachine(_ file: URL) throws {
    try SelfCheck(SelfCheck.Settings(contentsOf: file)).run(atBlock: checkStop) { report in
        if let end = report.end {
            try print("end", end)
        } else if let check = report.checks.last {
            try print("check", check)
        } else {
            try print("start", report.start)
        }
    }
}

func print(_ type: String, _ fields: any Encodable) throws {
    let line = try JSONEncoder.snakeCase.encode(JoinedObject(["type": type], fields)) + Data("\n".utf8)
    try FileHandle.standardOutput.write(contentsOf: line)
}

do {
    let arguments = CommandLine.arguments.dropFirst()
    switch (arguments.count, arguments.first) {
    case (2, "evaluate"): try evaluate(URL(fileURLWithPath: arguments[2]))
    case (2, "federate"):
        #if MESP_WHEEL
            fail("A wheel's mesp-engine takes no part in federations: build one in a checkout, with `make engine`.")
        #else
            try FederationSettings(contentsOf: URL(fileURLWithPath: arguments[2])).run()
        #endif
    case (2, "generate"): try generate(URL(fileURLWithPath: arguments[2]))
    case (2, "import"): try importModel(URL(fileURLWithPath: arguments[2]))
    case (2, "self-check"): try checkMachine(URL(fileURLWithPath: arguments[2]))
    case (1, "--version"): print("mesp-engine \(Run.version) with MLX \(MLXSupport.version)")
    case (1, let file?): try train(URL(fileURLWithPath: file))
    default:
        fail(
            "usage: mesp-engine [evaluate|federate|generate|import|self-check] SETTINGS.json, or mesp-engine --version")
    }
} catch is CancellationError {
    switch CommandLine.arguments[1] {
    case "evaluate": fail("The evaluation was stopped.")
    case "import": fail("The import was stopped; the next one continues it.")
    default: fail("The self-check was stopped.")
    }
} catch {
    fail(error.plainSentence.english)
}
leave(0)
