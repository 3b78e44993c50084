import Foundation
import Testing

@testable import MeSPBundle
@testable import MeSPCore
@testable import MeSPFiles

struct FormulaEdgesTests {
    private struct Edges: Decodable {
        struct Preference: Decodable {
            let objective: Objective
            let beta, weight: Number
            let isGood: Bool
            let tokens: [Int]
            let logProbabilities, references: [Number]
            let expected: [Double]?
        }

        struct Group: Decodable {
            let rewards: [Number]
            let tokens: [Int]
            let longest: Int?
            let expected: [Double]?
        }

        let preferences: [Preference]
        let groups: [Group]
    }

    private struct Number: Decodable {
        let value: Double

        init(from decoder: any Decoder) throws {
            value = try #require(Double(try decoder.singleValueContainer().decode(String.self)))
        }
    }

    private func edges() throws -> Edges {
        let file = try #require(Fixture.tied).appendingPathComponent("formula_edges.json")
        return try JSONDecoder.snakeCase.decode(Edges.self, from: Data(contentsOf: file))
    }

    private func expect(_ found: [Double], _ expected: [Double]?, tolerance: Double, _ edge: String) {
        guard let expected else {
            #expect(found.contains { !$0.isFinite }, "\(edge): \(found)")
            return
        }
        #expect(found.count == expected.count)
        for (found, expected) in zip(found, expected) {
            let allowed = tolerance * max(abs(expected), Double(Float.leastNormalMagnitude))
            #expect(abs(found - expected) <= allowed, "\(edge): \(found), \(expected)")
        }
    }

    @Test func preferencesEqualTheReference() throws {
        let edges = try edges().preferences
        #expect(edges.filter { $0.expected == nil }.count < edges.count / 2)
        for edge in edges {
            var settings = RunSettings(bundle: "", output: "")
            (settings.objective, settings.beta, settings.gamma) = (
                edge.objective, Float(edge.beta.value), Float(edge.weight.value)
            )
            let (weight, other) = (Float(edge.weight.value), Float(edge.weight.value) + 1)
            (settings.desirableWeight, settings.undesirableWeight) = edge.isGood ? (weight, other) : (other, weight)
            let answers = zip(edge.tokens, zip(edge.logProbabilities, edge.references)).map { count, logs in
                let example = Example(tokens: [Int32](repeating: 0, count: count + 1), counted: Array(0..<count))
                return AnswerProbability(
                    answer: PreferenceAnswer(
                        example: example, isGood: edge.isGood, source: .init(split: 0, prompt: 0, answer: 0),
                        lengths: [count]),
                    logProbability: logs.0.value, reference: logs.1.value)
            }
            let found =
                edge.objective.takesPairs
                ? PreferenceLoss(
                    edge.objective, chosen: answers[0], rejected: answers[1],
                    supervisedTargets: Double(answers[0].tokens), settings)
                : PreferenceLoss(answers[0], kl: PreferenceLoss.kl([answers[1]]), settings)
            expect([found.loss] + found.weights, edge.expected, tolerance: 1e-9, "\(edge)")
        }
    }

    @Test func advantagesEqualTheReference() throws {
        let edges = try edges().groups
        #expect(edges.filter { $0.expected == nil }.count < edges.count / 2)
        for edge in edges {
            let found = groupLoss(
                rewards: edge.rewards.map { Float($0.value) }, tokens: edge.tokens, longest: edge.longest)
            expect([found.loss] + found.weights.map { Double($0) }, edge.expected, tolerance: 1e-6, "\(edge)")
        }
    }
}
