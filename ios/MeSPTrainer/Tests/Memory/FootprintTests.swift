import Foundation
import Testing

@testable import MeSPCore

@Suite struct FootprintTests {
    private final class Process: @unchecked Sendable {
        private let lock = NSLock()
        private var (present, most, asked) = (0, 0, 0)
        var readings: Int { lock.withLock { asked } }

        func takes(_ bytes: Int) { lock.withLock { (present, most) = (bytes, max(most, bytes)) } }

        func source(hasKernel: Bool, interval: UInt32) -> FootprintSampler.Source {
            .init(
                now: { [self] in
                    lock.withLock {
                        asked += 1
                        return present
                    }
                }, highest: { [self] in hasKernel ? lock.withLock { most } : nil }, interval: interval)
        }
    }

    @Test func aPeakThatNobodyReadIsTheKernels() {
        let process = Process()
        process.takes(10)
        let sampler = FootprintSampler(process.source(hasKernel: true, interval: 3_600_000_000))
        defer { sampler.stop() }
        #expect(sampler.takePeak() == 10)
        process.takes(50)
        process.takes(20)
        #expect(sampler.takePeak() == 50)
        // A peak before the previous call of `takePeak` does not count.
        process.takes(30)
        #expect(sampler.takePeak() == 30)
        process.takes(51)
        process.takes(20)
        #expect(sampler.takePeak() == 51)
        #expect(process.readings < 8, "a thread that wakes once an hour")
    }

    @Test func withoutAKernelsPeakReadingsServe() throws {
        let process = Process()
        let sampler = FootprintSampler(process.source(hasKernel: false, interval: 1000))
        defer { sampler.stop() }
        _ = sampler.takePeak()
        process.takes(50)
        let before = process.readings
        while process.readings < before + 2 { usleep(1000) }
        process.takes(20)
        #expect(sampler.takePeak() == 50)
        #expect(sampler.takePeak() == 20)
    }
}
