import Foundation
import MLX
import MeSPBundle
import MeSPCore
import MeSPFiles
import MeSPSentences

#if canImport(Metal)
    import Metal
#endif

struct SystemGPU {
    let name: String
    let architecture: String
    let workingSet: Int
    let largestBuffer: Int

    static let current: SystemGPU? = {
        #if canImport(Metal)
            guard let device = MTLCreateSystemDefaultDevice() else { return nil }
            return SystemGPU(
                name: device.name, architecture: device.architecture.name,
                workingSet: Int(clamping: device.recommendedMaxWorkingSetSize),
                largestBuffer: device.maxBufferLength)
        #else
            nil
        #endif
    }()
}

extension CheckSuite {
    func describeMachine() -> Finding {
        let process = ProcessInfo.processInfo
        let (memory, page) = (Int(clamping: process.physicalMemory), Int(getpagesize()))
        let limit = systemMemoryLimit().flatMap { $0 < memory ? $0 : nil }
        return Finding(
            .note,
            "\(LogRecord.Start.host): \(process.activeProcessorCount) cores, \(shown(megabytes: memory)) of memory; thermal state \(ThermalState.current.rawValue).",
            [
                Measurement("cores", Double(process.activeProcessorCount)),
                Measurement("memory", Double(memory), "bytes"),
                Measurement("page", Double(page), "bytes"),
                Measurement("footprint", Double(memoryFootprint()), "bytes"),
            ] + (limit.map { [Measurement("memory limit", Double($0), "bytes")] } ?? []))
    }

    func describeGPU() throws -> Finding {
        guard bundle.device == .gpu else { throw Skipped(reason: "The self-check runs on the CPU.") }
        guard let gpu = SystemGPU.current else {
            return Finding(.note, "MLX has a GPU that Metal does not describe.")
        }
        let described: Sentence =
            "\(gpu.name), \(gpu.architecture): a working set of up to \(shown(megabytes: gpu.workingSet))."
        return Finding(
            .note,
            NeuralAccelerators.current.state == .off
                ? "\(described). Its neural accelerators are off, as MLX was in use before: restart the process, and check before anything else."
                : described,
            [
                Measurement("working set", Double(gpu.workingSet), "bytes"),
                Measurement("largest buffer", Double(gpu.largestBuffer), "bytes"),
            ])
    }

    /// Checks that mapping does not copy. If Metal refuses a mapped address, MLX silently copies the data. Then a change of the file does not appear
    /// in the array.
    func checkMapWithoutCopy() throws -> Finding {
        let size = min(largestFile.words * 4, 16 << 20)
        let path = Self.temporaryFolder.appendingPathComponent("mapped.\(UUID().uuidString)").path
        let file = open(path, O_RDWR | O_CREAT | O_EXCL, 0o600)
        guard file >= 0 else { throw MeSPError("Cannot make a file in \(Self.temporaryFolder.path): \(lastError()).") }
        unlink(path)
        defer { close(file) }
        guard ftruncate(file, off_t(size)) == 0, let mapped = try mapArray(file, offset: 0, [size / 4], .uint32) else {
            throw MeSPError("Cannot map a file in \(Self.temporaryFolder.path): \(lastError()).")
        }
        let words = tamper("map.no_copy", mapped)
        eval(words)
        let copies = try [0, size / 4 - 1].filter { index in
            var word = UInt32(index + 1)
            guard pwrite(file, &word, 4, off_t(index * 4)) == 4 else {
                throw MeSPError("Cannot write a file in \(Self.temporaryFolder.path): \(lastError()).")
            }
            return try words[index..<index + 1].number(UInt32.self) != word
        }
        return withExtendedLifetime(mapped) {
            Finding(
                copies.isEmpty ? .pass : .fail,
                copies.isEmpty
                    ? "An array over a mapped file is the file's own pages: what is written to the file shows in it."
                    : "An array over a mapped file is a copy: what is written to the file does not show in it.",
                [Measurement("mapped", Double(size), "bytes")])
        }
    }

    func measureMapFootprint() throws -> Finding {
        let size = largestFile.words * 4
        func read() throws -> Int {
            let words = try mappedWords(bundle.url.appendingPathComponent(largestFile.file), size: size, modified: nil)
            for tile in tiles(of: size / 4, size: 1 << 18) { eval(words[tile].max()) }
            Memory.clearCache()
            return withExtendedLifetime(words) { memoryFootprint() }
        }
        _ = try read()  // compiles kernels
        Memory.clearCache()
        let before = memoryFootprint()
        let during = try read()
        let after = memoryFootprint()
        return Finding(
            Self.verdict(footprintOfMap: during - before, size: size),
            "\(shown(megabytes: size)) of mapped weights, all read, add \(shown(megabytes: during - before)) to the footprint.",
            [
                Measurement("mapped", Double(size), "bytes"), Measurement("before", Double(before), "bytes"),
                Measurement("during", Double(during), "bytes"), Measurement("after", Double(after), "bytes"),
            ])
    }

    /// Returns the verdict on the growth of the footprint. A copy would add the whole size. For a small file the verdict is a note, because a
    /// kernel's own memory may be as large.
    static func verdict(footprintOfMap grown: Int, size: Int) -> SelfCheckReport.Verdict {
        let slack = 1_000_000
        guard size > 4 * slack else { return .note }
        return grown < size / 4 + slack ? .pass : .fail
    }

    /// Measures the time to map a block's file: the difference between the first and a repeated use of a map.
    func measureMapFirstUse() throws -> Finding {
        let file = bundle.file(ofBlock: 0)
        let (url, words) = (bundle.url.appendingPathComponent(file.file), file.words)
        func map() throws -> MLXArray { try mappedWords(url, size: words * 4, modified: nil) }
        let first = try medianTime { eval(try map().max()) }
        let second = try withExtendedLifetime(map()) { words in try medianTime { eval(words.max()) } }
        let cost = max(0, first - second)
        constants.mapSeconds = cost
        return Finding(
            .note, "Mapping a block of \(shown(megabytes: words * 4)) and using it takes \(shown(microseconds: cost)).",
            [
                Measurement("mapped", Double(words * 4), "bytes"), Measurement("first use", first, "s"),
                Measurement("used again", second, "s"), Measurement("map", cost, "s"),
            ])
    }

    func measureMapLeak() throws -> Finding {
        let file = Self.temporaryFolder.appendingPathComponent("mapped.\(UUID().uuidString)")
        try Data(count: mappingUnit).write(to: file)
        defer { try? FileManager.default.removeItem(at: file) }
        func map(times: Int) throws {
            for _ in 0..<times { _ = tamper("map.leak", try mappedWords(file, size: mappingUnit, modified: nil)) }
        }
        try map(times: 1000)
        let (before, thousands) = (memoryFootprint(), 10)
        try map(times: 1000 * thousands)
        let leaked = max(0, memoryFootprint() - before) / thousands
        return Finding(
            leaked <= Self.leakAllowed ? .pass : .fail,
            "A thousand mappings of a file leave \(shown(megabytes: leaked)) in the footprint; \(shown(megabytes: Self.leakAllowed)) is allowed.",
            [Measurement("leaked per thousand", Double(leaked), "bytes")])
    }

    /// The allowed growth of the footprint by a thousand maps, in bytes. In generation each token may map 30 blocks. Then a thousand tokens add at
    /// most 30 MB.
    private static let leakAllowed = 1_000_000

    /// Checks that the error box of `withError` has an error as soon as MLX reports it. A run checks the box, so that it stops before it uses wrong
    /// numbers.
    func checkErrors(provoke: () -> Void = CheckSuite.evaluateInsideTrace) throws -> Finding {
        func caught() throws -> (before: Bool, after: Bool) {
            var found = (before: false, after: false)
            _ = try? withError { box in
                do { try box.check() } catch { found.before = true }
                provoke()
                do { try box.check() } catch is MLXError { found.after = true }
            }
            return found
        }
        let found = try caught()
        let sum = try (MLXArray(Float(1)) + 1).number(Float.self)
        let isGood = !found.before && found.after && sum == 2
        return Finding(
            isGood ? .pass : .fail,
            isGood
                ? "An MLX error can be thrown when eval returns, and MLX continues computing."
                : "An MLX error cannot be thrown when eval returns, or MLX stops computing.",
            [Measurement("errors seen", found.after ? 1 : 0)])
    }

    /// Calls `eval` within a trace. MLX refuses this on each device.
    static func evaluateInsideTrace() {
        let traced = compile { (x: MLXArray) in
            eval(x)
            return x
        }
        _ = traced(MLXArray(Float(1)))
    }

    private var largestFile: Manifest.PackedFile {
        let manifest = bundle.manifest
        let blocks = manifest.blocks.flatMap { kind in kind.layers.map(kind.file) }
        return (blocks + [manifest.embedding, manifest.head]).max { $0.words < $1.words } ?? manifest.embedding
    }
}
