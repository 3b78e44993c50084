import MLX

/// The limits hold for the whole process, and other code may use MLX too. The trainer restores the other code's values while it waits and after it
/// has ended.
package enum MLXLimits {
    struct Limit: Hashable, Sendable {
        static let cache = Limit(name: "cache")
        static let memory = Limit(name: "memory")

        let name: String

        var value: Int {
            get { self == .cache ? Memory.cacheLimit : Memory.memoryLimit }
            nonmutating set {
                if self == .cache { Memory.cacheLimit = newValue } else { Memory.memoryLimit = newValue }
            }
        }
    }

    // Only the thread that works on MLX uses the next two variables (`MLXWork`).

    nonisolated(unsafe) private static var own = [Limit: [Int]]()
    /// The values that limits had before the trainer set them.
    nonisolated(unsafe) private static var ofProcess = [Limit: Int]()

    /// Restores the previous value afterwards, unless other code has changed the limit.
    static func set<R>(_ limit: Limit, to bytes: Int, _ body: () throws -> R) rethrows -> R {
        if own[limit]?.isEmpty ?? true { ofProcess[limit] = limit.value }
        own[limit, default: []].append(bytes)
        limit.value = bytes
        defer {
            own[limit]?.removeLast()
            if limit.value == bytes, let before = own[limit]?.last ?? ofProcess[limit] { limit.value = before }
        }
        return try body()
    }

    package static func giveBack<R>(during body: () throws -> R) rethrows -> R {
        let limits = own.compactMapValues(\.last)
        for limit in limits.keys { limit.value = ofProcess[limit] ?? limit.value }
        defer {
            for (limit, bytes) in limits {
                ofProcess[limit] = limit.value
                limit.value = bytes
            }
        }
        return try body()
    }
}
