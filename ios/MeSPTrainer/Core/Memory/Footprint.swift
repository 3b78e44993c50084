import Foundation

#if canImport(Darwin)
    import Darwin

    /// The task port of this process. Swift 6 with older SDKs rejects the variable `mach_task_self_` as shared mutable state. The port is requested
    /// once, as each call adds a reference.
    private let ownTask = task_self_trap()
#endif

/// Returns the memory that counts against the process, in bytes: `phys_footprint` on Apple's systems, anonymous memory (`RssAnon + VmSwap`) on Linux.
/// Neither includes clean pages of mapped files.
package func memoryFootprint() -> Int {
    #if canImport(Darwin)
        Int(ownMemory()?.phys_footprint ?? 0)
    #else
        processStatus(["RssAnon:", "VmSwap:"])
    #endif
}

#if canImport(Darwin)
    private func ownMemory() -> task_vm_info_data_t? {
        var info = task_vm_info_data_t()
        var count = mach_msg_type_number_t(MemoryLayout<task_vm_info_data_t>.size / MemoryLayout<natural_t>.size)
        let result = withUnsafeMutablePointer(to: &info) {
            $0.withMemoryRebound(to: integer_t.self, capacity: Int(count)) {
                task_info(ownTask, task_flavor_t(TASK_VM_INFO), $0, &count)
            }
        }
        return result == KERN_SUCCESS ? info : nil
    }
#endif

#if !canImport(Darwin)
    func processStatus(_ fields: [String]) -> Int {
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
#endif

/// The highest memory footprint in each of successive periods.
///
/// Apple's kernel records the highest footprint of the process's life (`ledger_phys_footprint_peak`). If this record rises in a period, it is the
/// period's peak. Otherwise, and on Linux, the peak is the highest reading of a sampling thread.
package final class FootprintSampler: @unchecked Sendable {
    struct Source {
        var now: @Sendable () -> Int
        var highest: @Sendable () -> Int?
        /// The time between two readings, in microseconds.
        var interval: UInt32

        #if canImport(Darwin)
            static let system = Source(
                now: memoryFootprint, highest: { ownMemory().map { Int($0.ledger_phys_footprint_peak) } },
                interval: 100_000)
        #else
            static let system = Source(now: memoryFootprint, highest: { nil }, interval: 10_000)
        #endif
    }

    private let source: Source
    private let lock = NSLock()
    private var read = 0
    private var known: Int
    private var running = true

    package convenience init() { self.init(.system) }

    init(_ source: Source) {
        (self.source, known) = (source, source.highest() ?? 0)
        let thread = Thread { [weak self] in
            while let self, self.sample() { usleep(source.interval) }
        }
        thread.name = "footprint"
        thread.start()
    }

    private func sample() -> Bool {
        let now = source.now()
        return lock.withLock {
            read = max(read, now)
            return running
        }
    }

    /// Returns the highest footprint since the last call, in bytes.
    package func takePeak() -> Int {
        let (now, highest) = (source.now(), source.highest() ?? 0)
        return lock.withLock {
            defer { (read, known) = (now, highest) }
            return max(read, now, highest > known ? highest : 0)
        }
    }

    package func stop() { lock.withLock { running = false } }
}

/// The time at which the process first ran work on a bundle, and the process's footprint at that time, in bytes. The first read initializes the
/// value.
package let firstUseOfMLX = (time: ContinuousClock.now, footprint: memoryFootprint())
