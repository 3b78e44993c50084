import Foundation

#if canImport(Darwin)
    import Darwin

    /// The port of this process. `mach_task_self_`, which holds it too, is a variable in C, and shared mutable state to Swift 6 before
    /// the SDKs of Xcode 16.3. Asked once: each call takes another reference to the port.
    private let ownTask = task_self_trap()
#endif

/// The memory that counts against the process, in bytes: `phys_footprint` on Apple's systems, anonymous memory (`RssAnon +
/// VmSwap`) on Linux. Mapped weight files are in neither.
public func memoryFootprint() -> Int {
    #if canImport(Darwin)
        var info = task_vm_info_data_t()
        var count = mach_msg_type_number_t(MemoryLayout<task_vm_info_data_t>.size / MemoryLayout<natural_t>.size)
        let result = withUnsafeMutablePointer(to: &info) {
            $0.withMemoryRebound(to: integer_t.self, capacity: Int(count)) {
                task_info(ownTask, task_flavor_t(TASK_VM_INFO), $0, &count)
            }
        }
        return result == KERN_SUCCESS ? Int(info.phys_footprint) : 0
    #else
        return processStatus(["RssAnon:", "VmSwap:"])
    #endif
}

#if !canImport(Darwin)
    /// The sum of some fields of `/proc/self/status`, in bytes.
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

/// Reads the footprint every 2 ms on a thread of its own and keeps the highest.
package final class FootprintSampler: @unchecked Sendable {
    private let lock = NSLock()
    private var peak = 0
    private var running = true

    package init() {
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
    package func takePeak() -> Int {
        let now = memoryFootprint()
        return lock.withLock {
            defer { peak = now }
            return max(peak, now)
        }
    }

    package func stop() { lock.withLock { running = false } }
}

/// The time at which the process first ran work on a bundle, and its footprint then in bytes. A global is initialized when it is first read:
/// `ModelBundle.withDevice` reads it.
package let firstUseOfMLX = (time: ContinuousClock.now, footprint: memoryFootprint())
