extension FixedWidthInteger {
    /// Takes the whole part of a number from a file, a server or a person. A number that does not fit becomes the nearest one that does, and NaN becomes 0.
    package init(whole number: some BinaryFloatingPoint) {
        self = Self(exactly: number.rounded(.towardZero)) ?? (number > 0 ? .max : number < 0 ? .min : 0)
    }
}
