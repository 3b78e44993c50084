import MLX

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
