import Foundation

@testable import MeSPControl
@testable import MeSPCore

@MainActor final class TestMonitor: DeviceMonitor {
    var scene = AppScene.active { didSet { tell(.change) } }
    var thermalState = ThermalState.nominal { didSet { tell(.change) } }
    var battery: Battery? = Battery(level: 0.8, isCharging: false) { didSet { tell(.change) } }
    var isLowPower = false { didSet { tell(.change) } }
    var availableMemory: Int?
    var isInUse = false
    var observers = [(DeviceEvent) -> Void]()

    func tell(_ event: DeviceEvent) {
        for observer in observers { observer(event) }
    }
}

/// A clock that only `advance(by:)` moves.
final class TestClock: Clock, @unchecked Sendable {
    typealias Duration = Swift.Duration

    struct Instant: InstantProtocol {
        var offset = Duration.zero
        func advanced(by duration: Duration) -> Instant { Instant(offset: offset + duration) }
        func duration(to other: Instant) -> Duration { other.offset - offset }
        static func < (a: Instant, b: Instant) -> Bool { a.offset < b.offset }
    }
    private let lock = NSLock()
    private var time = Instant()
    private var begun = 0
    let minimumResolution = Swift.Duration.zero

    var now: Instant { lock.withLock { time } }
    var sleeps: Int { lock.withLock { begun } }

    func advance(by duration: Duration) {
        lock.withLock { time = time.advanced(by: duration) }
    }

    func sleep(until deadline: Instant, tolerance: Duration?) async throws {
        lock.withLock { begun += 1 }
        while now < deadline { try await Task.sleep(for: .milliseconds(1)) }
    }
}
