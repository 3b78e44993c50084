/// A simulation of failing command buffers. Each evaluation is one command buffer, and each wait for a stream commits an empty one.
public struct FailingCommandBuffers: Sendable {
    /// The number of the first command buffer that fails, counted from 1.
    public var first: Int
    /// The number of command buffers that fail. After a failure, the next buffer fails only after the error has been thrown.
    public var count = 1
    /// The number of command buffers from one that fails to the next.
    public var period = 1
    /// The number of evaluations that still succeed after the failing one. The next evaluation throws the error and computes nothing. Synchronizing a
    /// stream throws the error earlier. The arrays of the failed buffer count as evaluated, and hold `garbage`.
    public var delay = Int.max
    public var garbage = Garbage.nan
    /// Whether allocations are counted and fail, in place of command buffers. The creation of an array, or the evaluation, that needs the memory throws
    /// the error. Reading an array that was not computed then counts as a fault, because it would end a process on Metal. This rule needs Linux.
    public var areAllocations = false
    public var message = hang

    /// The contents of a failed buffer's arrays. Integer and Boolean arrays get zeros in both cases.
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
