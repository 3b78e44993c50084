import Foundation

#if canImport(Darwin)
    import Darwin

    /// The port of this process. `mach_task_self_` is this port too. But `mach_task_self_` is a C variable, and with SDKs before Xcode 16.3's, Swift
    /// 6 takes it for shared mutable state. The port is requested only once, as each call takes another reference to it.
    private let ownTask = task_self_trap()
#endif

/// Returns the memory that counts against the process, in bytes: `phys_footprint` on Apple's systems, anonymous memory (`RssAnon + VmSwap`)
/// on Linux. Neither includes mapped weight files.
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
    /// Returns the sum of some fields of `/proc/self/status`, in bytes.
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

/// The highest footprint in each of successive periods.
///
/// Apple's kernel records the highest footprint of the process's life at every change (`ledger_phys_footprint_peak`). If this record rises in a
/// period, it is the highest footprint of the period. Otherwise the highest reading of a sampling thread counts. So the peak of a run that takes more
/// than the process took before is exact, and few readings suffice. On Linux only readings count, as the system records no peak of anonymous memory
/// alone: `VmHWM` includes mapped files.
package final class FootprintSampler: @unchecked Sendable {
    /// The functions that read the footprint.
    struct Source {
        /// The present footprint, in bytes.
        var now: @Sendable () -> Int
        /// The highest footprint of the process's life, in bytes; nil if the system records none.
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
    /// The highest reading since the last call of `takePeak`.
    private var read = 0
    /// The highest footprint of the process's life at the last call of `takePeak`.
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

/// The time at which the process first ran work on a bundle, and the process's footprint at that time, in bytes. A global is initialized when it is
/// first read, which here is in `ModelBundle.withDevice`.
package let firstUseOfMLX = (time: ContinuousClock.now, footprint: memoryFootprint())
