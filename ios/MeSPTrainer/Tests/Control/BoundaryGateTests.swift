import Foundation
import Testing

@testable import MeSPControl
@testable import MeSPCore

struct BoundaryGateTests {
    private func end(_ work: AsyncThrowingStream<Int, any Error>) async -> (messages: [Int], error: (any Error)?) {
        var messages = [Int]()
        do {
            for try await message in work { messages.append(message) }
            return (messages, nil)
        } catch {
            return (messages, error)
        }
    }

    @Test func aThreadBeginsWhenTheOneBeforeHasEnded() async {
        let (entered, release) = (DispatchSemaphore(value: 0), DispatchSemaphore(value: 0))
        let (first, second) = (BoundaryGate(), BoundaryGate())
        let before = first.start("before", sending: Int.self) { send in
            entered.signal()
            release.wait()
            send(1)
            try first.pass { _ in }
        }
        entered.wait()
        first.abandon()
        let after = second.start("after", sending: Int.self) { send in send(2) }
        let begin = ContinuousClock.now
        second.waitUntilAtRest(seconds: 0.3)
        #expect(ContinuousClock.now - begin >= .milliseconds(290), "it is not at rest before its turn")
        release.signal()
        let (messages, error) = await end(before)
        #expect(messages == [1] && error is CancellationError)
        #expect(await end(after).messages == [2])
    }

    @Test func whatIsAbandonedEndsWhereItWaits() async {
        let gate = BoundaryGate()
        gate.set([.app])
        let work = gate.start("held", sending: Int.self) { send in
            try gate.pass { if $0 != nil { send(1) } }
            send(2)
        }
        gate.stop()
        gate.waitUntilAtRest(seconds: 10)
        #expect(gate.boundaries == 0)
        gate.abandon()
        let (messages, error) = await end(work)
        #expect(!messages.contains(2) && error is CancellationError)
    }
}
