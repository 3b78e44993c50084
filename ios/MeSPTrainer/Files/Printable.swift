extension StringProtocol {
    /// Whether a text has no line breaks and no characters without a glyph, as Python's `str.isprintable` tells.
    package var isPrintable: Bool {
        unicodeScalars.allSatisfy { scalar in
            switch scalar.properties.generalCategory {
            case .control, .format, .surrogate, .privateUse, .unassigned, .lineSeparator, .paragraphSeparator: false
            case .spaceSeparator: scalar == " "
            default: true
            }
        }
    }
}
