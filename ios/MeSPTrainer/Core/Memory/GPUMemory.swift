import Foundation
import MLX

extension MLXSupport {
    /// The variable of the environment that says how many operations MLX encodes into one of Metal's command buffers before it commits
    /// it. MLX reads it when it first uses Metal.
    package static let commandBufferVariable = "MLX_MAX_OPS_PER_BUFFER"

    /// So many that several buffers fit into a workspace.
    ///
    /// The arrays of a command buffer are alive until it is complete. MLX's own numbers, 20 on an iPhone and 40 or 50 on an iPad or a Mac
    /// (device.cpp:341), make the memory of a step depend on the device, and leave one buffer running where memory is short: `eval` then
    /// polls for its end and keeps a core busy, where it sleeps while two or more run (scheduler.h:130).
    static let operationsOfShortBuffer = 4

    /// Whether several command buffers fit into a workspace.
    static var hasShortCommandBuffers: Bool {
        let set = getenv(commandBufferVariable).flatMap { Int(String(cString: $0)) }
        return set ?? operationsOfShortBuffer <= operationsOfShortBuffer
    }
}

/// Calls `body`, whose arrays take `bytes` above those that there are: beyond, MLX waits for the GPU before it encodes more.
///
/// An operation's output is taken when it is encoded, and its inputs go when the GPU is through with their command buffer, so that the
/// encoder's lead, of up to 11 command buffers, would be all memory. The limit counts mapped weights, which must be mapped already.
func withWorkspace<R>(_ bytes: Int?, _ body: () throws -> R) rethrows -> R {
    guard let bytes else { return try body() }
    let before = Memory.memoryLimit
    Memory.memoryLimit = Memory.activeMemory + bytes
    defer { Memory.memoryLimit = before }
    return try body()
}
