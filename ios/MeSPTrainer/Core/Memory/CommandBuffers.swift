import Foundation

/// How many operations MLX encodes into one of Metal's command buffers before it commits it.
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
