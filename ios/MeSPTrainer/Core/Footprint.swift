import Foundation

#if os(iOS)
    import os
#endif
#if canImport(Darwin)
    import Darwin
#else
    import Glibc
#endif

/// The memory that counts against the process, in bytes: `phys_footprint` on Apple's systems, anonymous memory (`RssAnon +
/// VmSwap`) on Linux. Mapped weight files are in neither.
public func memoryFootprint() -> Int {
    #if canImport(Darwin)
        var info = task_vm_info_data_t()
        var count = mach_msg_type_number_t(MemoryLayout<task_vm_info_data_t>.size / MemoryLayout<natural_t>.size)
        let result = withUnsafeMutablePointer(to: &info) {
            $0.withMemoryRebound(to: integer_t.self, capacity: Int(count)) {
                task_info(mach_task_self_, task_flavor_t(TASK_VM_INFO), $0, &count)
            }
        }
        return result == KERN_SUCCESS ? Int(info.phys_footprint) : 0
    #else
        return processStatus(["RssAnon:", "VmSwap:"])
    #endif
}

/// The footprint at which the system ends the process or gives it no more memory, in bytes; nil where it sets no limit.
///
/// On Linux the lower of `RLIMIT_DATA` and the memory limits of the process's control groups. The first counts memory that was asked for,
/// used or not, so what is reserved and not used is taken off.
public func systemMemoryLimit() -> Int? {
    #if os(iOS)
        // What an app holds already is not the run's.
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
    /// What a run reserves after it was planned and does not use: OpenBLAS's buffers of 32 MiB, of which it takes two at a time, and
    /// the stacks of threads.
    private let reservedLater = 76_000_000

    /// The sum of some fields of `/proc/self/status`, in bytes.
    private func processStatus(_ fields: [String]) -> Int {
        withUnsafeTemporaryAllocation(byteCount: 4096, alignment: 1) { buffer in
            let file = open("/proc/self/status", O_RDONLY)
            guard file >= 0 else { return 0 }
            defer { close(file) }
            let length = read(file, buffer.baseAddress, buffer.count)
            guard length > 0 else { return 0 }
            let lines = UnsafeRawBufferPointer(buffer)[..<length].split(separator: UInt8(ascii: "\n"))
            return lines.reduce(0) { total, line in
                guard fields.contains(where: { line.starts(with: $0.utf8) }) else { return total }
                let kibibytes = line.reduce(0) { (48...57).contains($1) ? $0 * 10 + Int($1) - 48 : $0 }
                return total + kibibytes * 1024
            }
        }
    }

    /// The memory limits of the process's control groups, from its own up, of version 1 or 2.
    private func controlGroupLimits() -> [Int] {
        func number(_ path: String) -> Int? {
            let text = try? String(contentsOfFile: path, encoding: .utf8)
            return text.flatMap { Int($0.trimmingCharacters(in: .whitespacesAndNewlines)) }
        }
        let groups = (try? String(contentsOfFile: "/proc/self/cgroup", encoding: .utf8)) ?? ""
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

/// Reads the footprint every 2 ms on a thread of its own and keeps the highest.
final class FootprintSampler: @unchecked Sendable {
    private let lock = NSLock()
    private var peak = 0
    private var running = true

    init() {
        let thread = Thread { [weak self] in
            while let self, self.sample() { usleep(2000) }
        }
        thread.name = "footprint"
        thread.start()
    }

    private func sample() -> Bool {
        let now = memoryFootprint()
        return lock.withLock {
            peak = max(peak, now)
            return running
        }
    }

    /// The highest footprint since the last call, in bytes.
    func takePeak() -> Int {
        let now = memoryFootprint()
        return lock.withLock {
            defer { peak = now }
            return max(peak, now)
        }
    }

    func stop() { lock.withLock { running = false } }
}
