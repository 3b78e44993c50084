import Testing

@testable import MeSPControl
@testable import MeSPCore

struct PauseConditionsTests {
    static let rows: [(scene: AppScene, usesGPU: Bool, away: Set<BackgroundGrant?>)] = [
        (.active, false, []), (.active, true, []), (.inactive, false, []),
        (.inactive, true, [nil, .continued, .overnight]), (.background, false, [nil]),
        (.background, true, [nil, .continued, .overnight]),
    ]

    @Test(arguments: rows, [nil] + BackgroundGrant.allCases.map(Optional.some))
    func sceneDeviceAndGrant(
        _ row: (scene: AppScene, usesGPU: Bool, away: Set<BackgroundGrant?>), _ grant: BackgroundGrant?
    ) {
        func found(_ battery: Battery?, _ thermalState: ThermalState = .nominal) -> Set<PauseReason> {
            PauseReason.reasons(
                scene: row.scene, usesGPU: row.usesGPU, grant: grant, thermalState: thermalState, battery: battery)
        }
        let reasons: Set<PauseReason> = row.away.contains(grant) ? [.away] : []
        let (charging, unplugged) = (Battery(level: 0.5, isCharging: true), Battery(level: 0.5, isCharging: false))
        #expect(found(nil) == reasons)
        #expect(found(charging) == reasons)
        let isNight = (row.scene, row.usesGPU, grant) == (.background, false, .overnight)
        let charger: Set<PauseReason> = isNight ? [.charger] : []
        #expect(found(unplugged) == reasons.union(charger))
        #expect(found(unplugged, .serious) == reasons.union(charger).union([.heat]))
    }

    @Test func noRowIsMissing() {
        #expect(Set(Self.rows.map { "\($0.scene) \($0.usesGPU)" }).count == AppScene.allCases.count * 2)
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
