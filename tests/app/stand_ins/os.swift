// The part of os on iOS that the core uses.

// os/proc.h
public func os_proc_available_memory() -> Int { 0 }

public struct OSLogMessage: ExpressibleByStringInterpolation {
    public enum Privacy { case `public` }
    public struct StringInterpolation: StringInterpolationProtocol {
        public init(literalCapacity: Int, interpolationCount: Int) {}
        public mutating func appendLiteral(_ literal: String) {}
        public mutating func appendInterpolation(_ text: @autoclosure () -> String, privacy: Privacy) {}
    }
    public init(stringLiteral value: String) {}
    public init(stringInterpolation: StringInterpolation) {}
}

public struct Logger: Sendable {
    public init(subsystem: String, category: String) {}
    public func info(_ message: OSLogMessage) {}
}

public final class OSSignpostIntervalState {}

public struct OSSignposter: Sendable {
    public init(subsystem: String, category: String) {}
    public func beginInterval(_ name: StaticString, _ message: OSLogMessage) -> OSSignpostIntervalState { .init() }
    public func endInterval(_ name: StaticString, _ state: OSSignpostIntervalState) {}
}
