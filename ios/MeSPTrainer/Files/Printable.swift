extension StringProtocol {
    /// Whether a text has no line breaks and no characters without a glyph, as Python's `str.isprintable` tells.
    package var isPrintable: Bool { unicodeScalars.allSatisfy(\.isPrinted) }
}

extension Unicode.Scalar {
    package var isPrinted: Bool {
        switch properties.generalCategory {
        case .control, .format, .surrogate, .privateUse, .unassigned, .lineSeparator, .paragraphSeparator: false
        case .spaceSeparator: self == " "
        default: true
        }
    }
}
