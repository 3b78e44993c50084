import CHostMLX
import Foundation

/// The memory that MLX has allocated, in bytes.
public enum Memory {

    private static let queue = DispatchQueue(label: "Memory")
    nonisolated(unsafe) private static var cacheLimitInUse: Int?

    public struct Snapshot: Codable, Sendable {
        public var activeMemory: Int
        public var cacheMemory: Int
        public var peakMemory: Int
    }

    /// Memory of living arrays.
    public static var activeMemory: Int { host_active_memory() }

    /// Memory that was freed and is kept; always 0 on the CPU.
    public static var cacheMemory: Int { host_cache_memory() }

    /// The most that was active; set to anything to begin again.
    public static var peakMemory: Int {
        get { host_peak_memory() }
        set { host_reset_peak_memory() }
    }

    public static func snapshot() -> Snapshot {
        Snapshot(activeMemory: activeMemory, cacheMemory: cacheMemory, peakMemory: peakMemory)
    }

    /// The most that is kept after it was freed.
    public static var cacheLimit: Int {
        get {
            queue.sync {
                if let limit = cacheLimitInUse { return limit }
                // It can only be read by setting it.
                let limit = host_set_cache_limit(cacheMemory)
                _ = host_set_cache_limit(limit)
                cacheLimitInUse = limit
                return limit
            }
        }
        set {
            queue.sync {
                cacheLimitInUse = newValue
                _ = host_set_cache_limit(newValue)
            }
        }
    }

    /// Beyond this, MLX waits for running work before it begins more.
    public static var memoryLimit: Int {
        get { queue.sync { host_memory_limit() } }
        set { queue.sync { host_set_memory_limit(newValue) } }
    }

    /// Gives back what is kept; on Linux also what the C library keeps.
    public static func clearCache() {
        evalLock.withLock { host_clear_cache() }
    }
}
