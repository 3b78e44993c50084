import Testing

@testable import MeSPControl
@testable import MeSPCore

struct PauseConditionsTests {
    static let rows: [(AppScene, usesGPU: Bool, BackgroundGrant?, Set<PauseReason>)] = [
        (.active, false, nil, []),
        (.active, false, .continued, []),
        (.active, false, .continuedOnGPU, []),
        (.active, false, .overnight, []),
        (.active, true, nil, []),
        (.active, true, .continued, []),
        (.active, true, .continuedOnGPU, []),
        (.active, true, .overnight, []),
        (.inactive, false, nil, []),
        (.inactive, false, .continued, []),
        (.inactive, false, .continuedOnGPU, []),
        (.inactive, false, .overnight, []),
        (.inactive, true, nil, [.away]),
        (.inactive, true, .continued, [.away]),
        (.inactive, true, .continuedOnGPU, []),
        (.inactive, true, .overnight, [.away]),
        (.background, false, nil, [.away]),
        (.background, false, .continued, []),
        (.background, false, .continuedOnGPU, []),
        (.background, false, .overnight, []),
        (.background, true, nil, [.away]),
        (.background, true, .continued, [.away]),
        (.background, true, .continuedOnGPU, []),
        (.background, true, .overnight, [.away]),
    ]

    @Test(arguments: rows) func sceneDeviceAndGrant(
        _ scene: AppScene, _ usesGPU: Bool, _ grant: BackgroundGrant?, _ reasons: Set<PauseReason>
    ) {
        func found(_ battery: Battery?, _ thermalState: ThermalState = .nominal) -> Set<PauseReason> {
            PauseReason.reasons(
                scene: scene, usesGPU: usesGPU, grant: grant, thermalState: thermalState, battery: battery)
        }
        let (charging, unplugged) = (Battery(level: 0.5, isCharging: true), Battery(level: 0.5, isCharging: false))
        #expect(found(nil) == reasons)
        #expect(found(charging) == reasons)
        let charger: Set<PauseReason> = (scene, usesGPU, grant) == (.background, false, .overnight) ? [.charger] : []
        #expect(found(unplugged) == reasons.union(charger))
        #expect(found(unplugged, .serious) == reasons.union(charger).union([.heat]))
    }

    @Test func noRowIsMissing() {
        let keys = Self.rows.map { "\($0.0) \($0.usesGPU) \(String(describing: $0.2))" }
        #expect(Set(keys).count == AppScene.allCases.count * 2 * (BackgroundGrant.allCases.count + 1))
    }

    @Test(arguments: zip(ThermalState.allCases, [false, false, true, true])) func heat(
        _ state: ThermalState, _ waits: Bool
    ) {
        #expect(PauseReason.reasons(thermalState: state) == (waits ? [.heat] : []))
    }

    @Test(
        arguments: [
            (0.19, false, true), (0.19, true, false), (0.2, false, false), (1, false, false), (0, true, false),
        ] as [(Float, Bool, Bool)]) func battery(_ level: Float, _ charges: Bool, _ waits: Bool)
    {
        let battery = Battery(level: level, isCharging: charges)
        #expect(PauseReason.reasons(battery: battery) == (waits ? [.battery] : []))
        let waitsInLowPowerMode: Set<PauseReason> = charges ? [] : [.lowPower]
        #expect(
            PauseReason.reasons(battery: battery, isLowPower: true)
                == waitsInLowPowerMode.union(waits ? [.battery] : []))
    }
}
