import Foundation
import MeSPCore
import MeSPSentences

/// A number of the form that a person types.
public enum NumberField: String, Sendable, CaseIterable {
    case steps, learningRate, limit, batchSize, accumulation, clipping, warmup

    /// As the form has it, for a sentence.
    var name: Sentence {
        switch self {
        case .steps: "Steps"
        case .learningRate: "Learning rate"
        case .limit: "Limit in MB"
        case .batchSize: "Sequences in a batch"
        case .accumulation: "Batches in a step"
        case .clipping: "Largest gradient norm"
        case .warmup: "Steps of warm-up"
        }
    }

    var isWhole: Bool {
        switch self {
        case .steps, .batchSize, .accumulation, .warmup: true
        case .learningRate, .limit, .clipping: false
        }
    }
}

/// Numbers as people write them: with the locale's decimal separator or a point, perhaps with an exponent.
struct TypedNumber {
    /// - Returns: nil where `text` is not a number.
    static func value(_ text: String, isWhole: Bool, locale: Locale = .current) -> Double? {
        var text = text.trimmingCharacters(in: .whitespaces)
        if let separator = locale.decimalSeparator { text = text.replacingOccurrences(of: separator, with: ".") }
        guard let value = Double(text), value.isFinite, !isWhole || value == value.rounded(), abs(value) < 1e15
        else { return nil }
        return value
    }

    /// Four digits of it, without grouping, so that it can be read again.
    static func text(_ value: Double, isWhole: Bool, locale: Locale = .current) -> String {
        if isWhole { return "\(Int(value))" }
        return String(format: "%.4g", value).replacingOccurrences(of: ".", with: locale.decimalSeparator ?? ".")
    }
}
