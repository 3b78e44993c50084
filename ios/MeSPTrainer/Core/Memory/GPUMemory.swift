import Foundation
import MLX

/// The number of operations that MLX encodes into one of Metal's command buffers before it commits it.
///
/// The arrays of a command buffer are alive until it is complete. MLX's own numbers, 20 on an iPhone and 40 or 50 on an iPad or a Mac
/// (device.cpp:341), make the memory of a step depend on the device, and leave one buffer running where memory is short: `eval` then polls
/// for its end and keeps a core busy, where it sleeps while two or more run (scheduler.h:130). With few operations several buffers fit
/// into a workspace.
package enum CommandBuffers {
    /// MLX reads this variable of the environment when it first uses Metal.
    package static let variable = "MLX_MAX_OPS_PER_BUFFER"
    /// MLX commits a buffer once it holds more operations than this.
    static let few = 4

    /// Whether several command buffers fit into a workspace.
    static var areShort: Bool { getenv(variable).flatMap { Int(String(cString: $0)) } ?? few <= few }
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
