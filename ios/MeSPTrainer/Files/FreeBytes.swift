import Foundation

extension URL {
    /// The number of free bytes on the disk of a folder; nil if it is unknown. On iOS and macOS it includes space that the system can free.
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

extension URL {
    /// Returns a place in the folder `MeSP` of the Application Support folder.
    package static func inSupport(_ path: String) -> URL {
        let support = FileManager.default.urls(for: .applicationSupportDirectory, in: .userDomainMask).first
        return (support ?? FileManager.default.temporaryDirectory).appendingPathComponent("MeSP/\(path)")
    }
}

extension Int {
    package var megabytes: String { megabytes(.toNearestOrEven) }

    /// Returns the number of bytes as text in MB. Less than 10 MB have a decimal.
    package func megabytes(_ rule: FloatingPointRoundingRule) -> String {
        let (number, digits) = (Double(self) / 1e6, self < 10_000_000 && rule != .toNearestOrEven ? 1 : 0)
        return "\(number.formatted(.number.precision(.fractionLength(digits)).rounded(rule: rule))) MB"
    }
}
