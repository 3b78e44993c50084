import Foundation

extension URL {
    /// The number of free bytes of a folder's disk, including bytes that the system would free for a person's request; nil if the number is unknown.
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
    /// A number of bytes as text in MB.
    package var megabytes: String { "\((Double(self) / 1e6).formatted(.number.precision(.fractionLength(0)))) MB" }
}
