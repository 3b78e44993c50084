// The part of Network that the app uses.

import Foundation

// developer.apple.com/documentation/network/nwpath, …/nwpath/isexpensive, …/nwpath/isconstrained
public struct NWPath: Sendable {
    public var isExpensive: Bool { false }
    public var isConstrained: Bool { false }
}

// developer.apple.com/documentation/network/nwpathmonitor, …/nwpathmonitor/pathupdatehandler, …/nwpathmonitor/start(queue:)
public final class NWPathMonitor: Sendable {
    public init() {}
    public var pathUpdateHandler: (@Sendable (NWPath) -> Void)? {
        get { nil }
        set {}
    }
    public func start(queue: DispatchQueue) {}
}
