import Foundation
import MLX
import MeSPBundle

/// Work on MLX. All work on MLX begins in this type, so that one thread works on MLX at a time.
///
/// In MLX 0.32 only the thread that made a stream may evaluate arrays on it. Swift's streams are an exception: all threads may use them.
/// Constants of imported functions and parts of derivatives are on streams that C++ made for the thread (export.cpp:1155,
/// transforms.cpp:33). So a piece of work stays on one thread from its first function to its last value.
package enum MLXWork {
    private static let turn = NSRecursiveLock()
    private static let thread = WorkThread()

    /// Waits until no other thread works on MLX, and calls `body` with `device` as MLX's default.
    ///
    /// - Parameter backend: `gpu` if errors of `device` come later than the work that failed; see `MLXErrors`.
    /// - Throws: the errors of `body`, and the errors of MLX, which outside of this function end the process.
    static func run<R>(on device: Device, as backend: Backend, _ body: () throws -> R) throws -> R {
        try turn.withLock {
            try Device.$outer.withValue(.outer ?? .defaultDevice()) {
                // Naming a device is the first call that can fail.
                let stream = try MLXErrors.collect {
                    // An imported function runs on the first stream that was made for its device (export.cpp:500). So Swift's streams are made first.
                    _ = (Stream.defaultStream, Stream.cpu)
                    return backend == .gpu ? Stream.defaultStream(device.deviceType) : nil
                }
                return try MLXErrors.collect(on: stream) { try Device.withDefaultDevice(device, body) }
            }
        }
    }

    /// Runs `body` on the one thread that works on MLX in an app and in a federation, after the work that was added before. There is one
    /// thread, as MLX never frees some of the data that it makes for a thread.
    package static func start(_ name: String, _ body: @escaping @Sendable () -> Void) { thread.add(name, body) }
}

/// A thread that does one piece of work after the other.
private final class WorkThread: @unchecked Sendable {
    private let condition = NSCondition()
    private var waiting = [(name: String, body: @Sendable () -> Void)]()

    init() {
        let thread = Thread { [self] in while true { work() } }
        // MLX walks deep graphs recursively, which takes a large stack.
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
