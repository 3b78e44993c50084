import Foundation

extension URL {
    /// The space that the system would free where a folder is, for something that a person has asked for; nil where it says nothing.
    public var freeBytes: Int? {
        #if os(iOS) || os(macOS)
            let values = try? resourceValues(forKeys: [.volumeAvailableCapacityForImportantUsageKey])
            return values?.volumeAvailableCapacityForImportantUsage.map { Int($0) }
        #else
            let attributes = try? FileManager.default.attributesOfFileSystem(forPath: path)
            return (attributes?[.systemFreeSize] as? NSNumber)?.intValue
        #endif
    }
}

extension Int {
    /// Bytes as a size in words.
    package var megabytes: String { "\((Double(self) / 1e6).formatted(.number.precision(.fractionLength(0)))) MB" }
}
