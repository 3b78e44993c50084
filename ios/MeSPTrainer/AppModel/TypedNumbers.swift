import Foundation
import MeSPCore
import MeSPFiles
import MeSPSentences

public enum NumberField: String, Sendable, CaseIterable {
    case steps, epochs, learningRate, limit, batchSize, accumulation, clipping, warmup

    var name: Sentence {
        switch self {
        case .steps: "Steps"
        case .epochs: "Epochs"
        case .learningRate: "Learning rate"
        case .limit: "Limit in MB"
        case .batchSize: "Sequences in a batch"
        case .accumulation: "Batches in a step"
        case .clipping: "Largest gradient norm"
        case .warmup: "Steps of warm-up"
        }
    }

    var isWhole: Bool { [.steps, .batchSize, .accumulation, .warmup].contains(self) }
}

struct TypedNumber {
    /// Returns the number in `text`, or nil if `text` is not a number or the number is too large. The magnitude must be below 10¹⁵.
    static func value(_ text: String, isWhole: Bool, locale: Locale = .current) -> Double? {
        var text = text.trimmingCharacters(in: .whitespaces)
        if let separator = locale.decimalSeparator { text = text.replacingOccurrences(of: separator, with: ".") }
        guard let value = Double(text), value.isFinite, !isWhole || value == value.rounded(), abs(value) < 1e15
        else { return nil }
        return value
    }

    /// Returns the number as text that `value(_:isWhole:locale:)` can parse: all digits of an integer, or four significant digits.
    static func text(_ value: Double, isWhole: Bool, locale: Locale = .current) -> String {
        if isWhole { return "\(Int(whole: value))" }
        return String(format: "%.4g", value).replacingOccurrences(of: ".", with: locale.decimalSeparator ?? ".")
    }
}
