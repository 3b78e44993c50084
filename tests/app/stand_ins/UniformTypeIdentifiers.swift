// The part of UniformTypeIdentifiers that the app uses.

// developer.apple.com/documentation/uniformtypeidentifiers/uttype-swift.struct
public struct UTType: Sendable, Hashable {
    public init(exportedAs: String, conformingTo: UTType? = nil) {}
    public static var plainText: UTType { fatalError() }
    public static var json: UTType { fatalError() }
    public static var data: UTType { fatalError() }
    public static var folder: UTType { fatalError() }
    public static var zip: UTType { fatalError() }
    public static var commaSeparatedText: UTType { fatalError() }
}
