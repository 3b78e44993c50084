import Foundation
import Testing

@testable import MeSPBundle

/// These tests set an environment variable of MLX. Other tests in the process are not affected, because MLX on a CPU does not read it.
@Suite(.serialized) final class NeuralAcceleratorsTests {
    private let folder = temporaryFolder()
    private var record: URL { folder.appendingPathComponent("MeSP/neural-accelerators") }

    init() { unsetenv(NeuralAccelerators.variable) }
    deinit {
        unsetenv(NeuralAccelerators.variable)
        try? FileManager.default.removeItem(at: folder)
    }

    private func make(_ architecture: String?, _ major: Int = 26, _ minor: Int = 2) -> NeuralAccelerators {
        let before = told
        let accelerators = NeuralAccelerators(
            architecture: architecture,
            system: OperatingSystemVersion(majorVersion: major, minorVersion: minor, patchVersion: 0), record: record)
        #expect(told == before, "only hide() sets it")
        accelerators.hide()
        return accelerators
    }

    private var told: String? { getenv(NeuralAccelerators.variable).map { String(cString: $0) } }

    /// As in MLX's `is_nax_available`: a GPU has neural accelerators from generation 18 on if its name ends in p, and otherwise from generation 17
    /// on.
    @Test(arguments: [
        ("applegpu_g18p", "applegpu_g17p"), ("applegpu_g19p", "applegpu_g17p"), ("applegpu_g17g", "applegpu_g16g"),
        ("applegpu_g17s", "applegpu_g16s"), ("applegpu_g18d", "applegpu_g16d"),
    ])
    func areOffUntilASelfCheckHasPassed(_ architecture: String, _ before: String) {
        let first = make(architecture)
        #expect(first.state == .off && told == before && first.refusal == nil)
        first.endCheck(hasPassed: true)
        #expect(first.state == .off, "nothing was checked")
        first.beginCheck()
        #expect(first.state == .checking && told == nil && first.refusal == nil)
        first.endCheck(hasPassed: true)
        #expect(first.state == .on && first.refusal == nil)

        #expect(make(architecture).state == .on && told == nil, "it is remembered")
        #expect(make("applegpu_g20p").state == .off, "of another GPU nothing is known")
    }

    @Test(
        arguments: [
            ("applegpu_g17p", 26, 2), ("applegpu_g16s", 26, 2), ("applegpu_g13g", 26, 2), ("applegpu_g18p", 26, 1),
            ("applegpu_g18p", 18, 6), (nil, 26, 2), ("", 26, 2), ("p", 26, 2), ("applegpu_p", 26, 2),
        ] as [(String?, Int, Int)])
    func whatLacksThemKeepsItsName(_ architecture: String?, _ major: Int, _ minor: Int) {
        let absent = make(architecture, major, minor)
        absent.beginCheck()
        #expect(absent.state == .absent && told == nil)
        absent.endCheck(hasPassed: false)
        #expect(absent.state == .absent && absent.refusal == nil)
    }

    @Test(arguments: [(26, 2), (26, 3), (27, 0)])
    func laterSystemsHaveThem(_ major: Int, _ minor: Int) { #expect(make("applegpu_g18p", major, minor).state == .off) }

    /// MLX reads the variable once in a process, so it keeps using the neural accelerators after a failed check.
    @Test func afterACheckThatFailedTheGPUIsRefused() throws {
        let failed = make("applegpu_g18p")
        failed.beginCheck()
        failed.endCheck(hasPassed: false)
        #expect(failed.state == .failed)
        let refusal = try #require(failed.refusal)
        #expect(refusal.english.hasPrefix("The self-check of this GPU's neural accelerators did not pass"))
        #expect(!FileManager.default.fileExists(atPath: record.path))
        #expect(make("applegpu_g18p").state == .off && told == "applegpu_g17p", "the next process has none of it")
    }

    @Test func aRecordOfAnotherSystemOrMLXDoesNotCount() throws {
        let passed = make("applegpu_g18p")
        passed.beginCheck()
        passed.endCheck(hasPassed: true)
        let line = try String(contentsOf: record, encoding: .utf8)
        #expect(line.contains(MLXSupport.version))
        #expect(line.contains(ProcessInfo.processInfo.operatingSystemVersionString))
        try Data(line.replacing("MLX ", with: "MLX 9").utf8).write(to: record)
        #expect(make("applegpu_g18p").state == .off)
    }

    @Test func aNameInTheEnvironmentStays() {
        setenv(NeuralAccelerators.variable, "applegpu_g18p", 1)
        let byHand = make("applegpu_g18p")
        byHand.beginCheck()
        #expect(byHand.state == .absent && told == "applegpu_g18p")
    }
}
