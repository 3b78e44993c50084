import Foundation
import MLX
import MeSPBundle

#if canImport(Darwin)
    import Darwin
#endif

/// In MLX 0.32 an array on a stream that C++ made for a thread may be evaluated only on that thread. Imported functions and derivatives have such
/// arrays. So a piece of work stays on one thread from beginning to end.
package enum MLXWork {
    private static let turn = NSRecursiveLock()
    private static let thread = WorkThread()

    /// Waits until no other thread works on MLX, and calls `body` with `device` as MLX's default device.
    ///
    /// - Parameter backend: `gpu` if errors of `device` are reported asynchronously; see `MLXErrors`.
    static func run<R>(on device: Device, as backend: Backend, _ body: () throws -> R) throws -> R {
        try turn.withLock {
            try Device.$outer.withValue(.outer ?? .defaultDevice()) {
                let stream = try MLXErrors.collect {
                    // An imported function runs on the first stream of its device, so Swift's streams are created first.
                    _ = (Stream.defaultStream, Stream.cpu)
                    return backend == .gpu ? Stream.defaultStream(device.deviceType) : nil
                }
                return try MLXErrors.collect(on: stream) { try Device.withDefaultDevice(device, body) }
            }
        }
    }

    /// Runs `body` on the thread for work on MLX, after the work that was added before. All work shares one thread, as MLX never frees some of a
    /// thread's data.
    ///
    /// - Parameter isUrgent: false lets an Apple device save energy, as a run at night does.
    package static func start(_ name: String, isUrgent: Bool = true, _ body: @escaping @Sendable () -> Void) {
        thread.add(.init(name: name, isUrgent: isUrgent, body: body))
    }
}

private final class WorkThread: @unchecked Sendable {
    struct Work {
        let name: String
        let isUrgent: Bool
        let body: @Sendable () -> Void
    }

    private let condition = NSCondition()
    private var waiting = [Work]()

    init() {
        let thread = Thread { [self] in while true { work() } }
        // MLX walks deep graphs recursively, which takes a large stack.
        thread.stackSize = 16 << 20
        thread.start()
    }

    func add(_ work: Work) {
        condition.withLock {
            waiting.append(work)
            condition.signal()
        }
    }

    private func work() {
        let work = condition.withLock {
            while waiting.isEmpty { condition.wait() }
            return waiting.removeFirst()
        }
        Thread.current.name = work.name
        #if canImport(Darwin)
            pthread_set_qos_class_self_np(work.isUrgent ? QOS_CLASS_USER_INITIATED : QOS_CLASS_UTILITY, 0)
        #endif
        #if canImport(ObjectiveC)
            autoreleasepool(invoking: work.body)
        #else
            work.body()
        #endif
    }
}
