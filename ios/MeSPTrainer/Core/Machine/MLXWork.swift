import Foundation
import MLX
import MeSPBundle

/// Work on MLX, which is started here only, so that one thread does it at a time.
///
/// In MLX 0.32 only the thread that made a stream may evaluate what is on it; Swift's streams are for all. Constants of imported functions
/// and parts of derivatives are on streams that C++ made for the thread (export.cpp:1155, transforms.cpp:33). So a piece of work stays on
/// its thread from the first function to the last value.
package enum MLXWork {
    private static let turn = NSRecursiveLock()
    private static let thread = WorkThread()

    /// Calls `body` with `device` as MLX's default, once no other thread works on MLX.
    ///
    /// - Parameter backend: `gpu` where errors of `device` come later than the work that failed; see `MLXErrors`.
    /// - Throws: the errors of MLX, which end the process elsewhere, and of `body`.
    static func run<R>(on device: Device, as backend: Backend, _ body: () throws -> R) throws -> R {
        try turn.withLock {
            try Device.$outer.withValue(.outer ?? .defaultDevice()) {
                // Naming a device is the first thing that can fail.
                let stream = try MLXErrors.collect {
                    // An imported function runs on the first stream of its device that was made (export.cpp:500): on Swift's.
                    _ = (Stream.defaultStream, Stream.cpu)
                    return backend == .gpu ? Stream.defaultStream(device.deviceType) : nil
                }
                return try MLXErrors.collect(on: stream) { try Device.withDefaultDevice(device, body) }
            }
        }
    }

    /// Begins `body` on the one thread that works on MLX in an app and in a federation, once what it began before has ended. MLX keeps what
    /// it makes for a thread, some of it for ever.
    package static func start(_ name: String, _ body: @escaping @Sendable () -> Void) { thread.add(name, body) }
}

/// A thread that does one piece of work after the other.
private final class WorkThread: @unchecked Sendable {
    private let condition = NSCondition()
    private var waiting = [(name: String, body: @Sendable () -> Void)]()

    init() {
        let thread = Thread { [self] in while true { work() } }
        // That of a main thread: MLX walks deep graphs recursively.
        thread.stackSize = 16 << 20
        thread.qualityOfService = .userInitiated
        thread.start()
    }

    func add(_ name: String, _ body: @escaping @Sendable () -> Void) {
        condition.withLock {
            waiting.append((name, body))
            condition.signal()
        }
    }

    private func work() {
        let (name, body) = condition.withLock {
            while waiting.isEmpty { condition.wait() }
            return waiting.removeFirst()
        }
        Thread.current.name = name
        #if canImport(ObjectiveC)
            autoreleasepool(invoking: body)
        #else
            body()
        #endif
    }
}
