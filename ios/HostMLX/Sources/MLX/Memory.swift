import CHostMLX
import Foundation

/// MLX's use of memory, and its limits, in bytes.
public enum Memory {

    private static let queue = DispatchQueue(label: "Memory")
    nonisolated(unsafe) private static var cacheLimitInUse: Int?

    public struct Snapshot: Codable, Sendable {
        public var activeMemory: Int
        public var cacheMemory: Int
        public var peakMemory: Int
    }

    public static var activeMemory: Int { host_active_memory() }

    public static var cacheMemory: Int { host_cache_memory() }

    /// The peak of the active memory. Setting it to any value resets it.
    public static var peakMemory: Int {
        get { host_peak_memory() }
        set { host_reset_peak_memory() }
    }

    public static func snapshot() -> Snapshot {
        Snapshot(activeMemory: activeMemory, cacheMemory: cacheMemory, peakMemory: peakMemory)
    }

    public static var cacheLimit: Int {
        get {
            queue.sync {
                if let limit = cacheLimitInUse { return limit }
                // MLX returns the present limit only when a new one is set.
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

    /// The memory limit. Above it, MLX waits for running work before it starts more.
    public static var memoryLimit: Int {
        get { queue.sync { host_memory_limit() } }
        set { queue.sync { host_set_memory_limit(newValue) } }
    }

    /// Frees the cache. With glibc, also returns the C library's free memory to the system if there is much of it.
    public static func clearCache() {
        evalLock.withLock { host_clear_cache() }
    }
}
