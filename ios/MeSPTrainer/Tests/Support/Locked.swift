import Foundation

final class Locked<Value>: @unchecked Sendable {
    private let lock = NSLock()
    private var held: Value

    init(_ value: Value) { held = value }

    var value: Value { lock.withLock { held } }

    func change(_ body: (inout Value) -> Void) { lock.withLock { body(&held) } }
}
