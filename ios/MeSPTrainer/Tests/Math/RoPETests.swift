import MLX
import Testing

@testable import MeSPBundle
@testable import MeSPCore

@Suite struct RoPETests {
    /// An unrotated pair needs a finite period, because infinity is not reliable under fast math.
    @Test func aPairThatStaysHasAFinitePeriod() throws {
        let mixers = try Fixture.cases.flatMap { try Fixture($0, "gradients").bundle.architecture.mixers }
        let attentions = mixers.compactMap { mixer -> AttentionMixer? in
            guard case .attention(let attention) = mixer else { return nil }
            return attention
        }
        let mixer = try #require(attentions.first { $0.frequencies.contains(0) })
        for sign in [1, -1] as [Float] {
            let areFinite = mixer.periods(sign: sign).asArray(Float.self).allSatisfy { $0.isFinite }
            #expect(areFinite)
        }
        let x = MLXRandom.normal([2, 5, mixer.headDim])
        let turned = [mixer.rope(x, at: .from(100_000)), mixer.ropeBackward(dy: x, start: 100_000)]
        for (place, frequency) in mixer.frequencies.enumerated() where frequency == 0 {
            for column in [place, place + mixer.frequencies.count] {
                let own = mixer.ropeScale * x[.ellipsis, column]
                for turned in turned { #expect(turned[.ellipsis, column].arrayEqual(own).item(Bool.self)) }
            }
        }
    }
}
