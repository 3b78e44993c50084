import Foundation

#if os(iOS)
    import os
#endif

/// Returns the memory footprint that the system allows the process, in bytes; nil if there is no limit.
///
/// On Linux the limit is the lowest of `RLIMIT_DATA` and the memory limits of the process's control groups. `RLIMIT_DATA` counts allocated memory, so
/// memory that is allocated but not used is subtracted from that limit.
package func systemMemoryLimit() -> Int? {
    #if os(iOS)
        // The remaining memory is the limit for the run. Memory that the app already holds does not count.
        let available = Int(os_proc_available_memory())
        return available > 0 ? available : nil
    #elseif canImport(Darwin)
        return nil
    #else
        var limit = rlimit()
        getrlimit(.init(RLIMIT_DATA.rawValue), &limit)
        let unused = processStatus(["VmData:"]) - memoryFootprint() + reservedLater
        let data = limit.rlim_cur < UInt(Int.max) ? [max(0, Int(limit.rlim_cur) - unused)] : []
        return (data + controlGroupLimits()).min()
    #endif
}

#if !canImport(Darwin)
    /// The memory that a run reserves but does not use: two OpenBLAS buffers of 32 MiB, and thread stacks.
    private let reservedLater = 76_000_000

    private func controlGroupLimits() -> [Int] {
        func number(_ path: String) -> Int? {
            let text = try? String(contentsOfFile: path, encoding: .utf8)
            return text.flatMap { Int($0.trimmingCharacters(in: .whitespacesAndNewlines)) }
        }
        // `String(contentsOfFile:)` reads at most 4096 bytes of a file in /proc.
        let list = try? FileHandle(forReadingFrom: URL(fileURLWithPath: "/proc/self/cgroup")).readToEnd()
        let groups = String(decoding: list ?? Data(), as: UTF8.self)
        return groups.split(separator: "\n").flatMap { line -> [Int] in
            let parts = line.split(separator: ":", maxSplits: 2, omittingEmptySubsequences: false)
            guard parts.count == 3, parts[1].isEmpty || ",\(parts[1]),".contains(",memory,") else {
                return []
            }
            let (root, file) =
                parts[1].isEmpty ? ("/sys/fs/cgroup", "memory.max") : ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            var path = parts[2].split(separator: "/").map(String.init)
            var limits = [Int]()
            while true {
                if let limit = number(([root] + path + [file]).joined(separator: "/")) { limits.append(limit) }
                if path.popLast() == nil { return limits }
            }
        }
    }
#endif
