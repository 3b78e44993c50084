import Foundation
import MLX
import Testing

@testable import MeSPBundle
@testable import MeSPCore

@Suite(.serialized) struct MLXWorkTests {
    @Test func oneThreadAtATime() throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        let (log, ended) = (Locked([String]()), DispatchSemaphore(value: 0))
        let url = fixture.bundle.url
        for name in ["a", "b"] {
            Thread.detachNewThread {
                try? ModelBundle(url: url, checksums: false).withDevice {
                    log.change { $0.append(name) }
                    Thread.sleep(forTimeInterval: 0.1)
                    try ModelBundle(url: url, checksums: false).withDevice { log.change { $0.append(name) } }
                }
                ended.signal()
            }
        }
        for _ in 0..<2 { ended.wait() }
        #expect([["a", "a", "b", "b"], ["b", "b", "a", "a"]].contains(log.value))
    }

    @Test func whatIsBegunLaterIsDoneLater() {
        let (log, ended) = (Locked([String]()), DispatchSemaphore(value: 0))
        for name in ["a", "b", "c"] {
            MLXWork.start(name) {
                log.change { $0.append("\(name) \(ObjectIdentifier(Thread.current))") }
                Thread.sleep(forTimeInterval: 0.02)
                log.change { $0.append(name) }
                ended.signal()
            }
        }
        for _ in 0..<3 { ended.wait() }
        #expect(log.value.map { String($0.prefix(1)) } == ["a", "a", "b", "b", "c", "c"])
        #expect(Set(log.value.filter { $0.count > 1 }.map { $0.dropFirst() }).count == 1)
    }

    #if os(Linux)
        /// MLX starts a thread for each stream. Such a thread lives as long as the process.
        @Test func runsLeaveNoThreads() throws {
            func threads() throws -> Int {
                try FileManager.default.contentsOfDirectory(atPath: "/proc/self/task").count
            }
            func run(_ method: GradientMethod) throws {
                let output = temporaryFolder()
                var settings = try RunSettings.ofATest(output)
                (settings.method, settings.steps, settings.valBatches) = (method, 1, 1)
                let (begun, ended) = (settings, DispatchSemaphore(value: 0))
                let log = Locked([String]())
                MLXWork.start("run") {
                    do { try Run.run(begun) } catch { log.change { $0.append("\(error)") } }
                    ended.signal()
                }
                ended.wait()
                #expect(log.value == [])
            }
            try run(.mebp)
            let before = try threads()
            for _ in 0..<3 { try run(.mebp) }
            while try threads() > before { usleep(1000) }  // the thread that samples a run's footprint ends soon
        }
    #endif
}
