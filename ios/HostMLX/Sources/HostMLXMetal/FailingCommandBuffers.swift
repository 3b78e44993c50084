/// Command buffers that fail, each evaluation being one. `Sources/CHostMLX/FailingCommandBuffers.cpp` does it.
public struct FailingCommandBuffers: Sendable {
    /// The number of the first that fails, from 1.
    public var first: Int
    /// How many fail: after the error of one was thrown, the next does.
    public var count = 1
    /// The evaluations that go through before one throws the error and computes nothing. Waiting for a stream throws it earlier. It is
    /// thrown once. The buffer's arrays count as evaluated and hold `garbage`.
    public var delay = Int.max
    public var garbage = Garbage.nan
    /// Whether the evaluation throws the error itself and computes nothing, as where memory is refused. `item()` is then 0, and reading
    /// the data of an array, which ends a process on Metal, is a fault.
    public var isAtOnce = false
    public var message = hang

    /// The contents of the arrays of a buffer that failed; integers are zeros.
    public enum Garbage: Sendable, CaseIterable { case nan, zeros }

    public static let hang = description("Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)")
    public static let refusedInBackground = description(
        "Insufficient Permission (to submit GPU work from background) "
            + "(00000006:kIOGPUCommandBufferCallbackErrorBackgroundExecutionNotPermitted)")
    public static let outOfMemory = description(
        "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)")

    private static func description(_ reason: String) -> String {
        "[METAL] Command buffer execution failed: \(reason)."
    }

    public init(first: Int) { self.first = first }
}
