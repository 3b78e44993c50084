// The part of Metal that the package uses.

// developer.apple.com/documentation/metal/mtldevice, …/mtlarchitecture, …/mtlgpufamily, …/mtlcreatesystemdefaultdevice()
public enum MTLGPUFamily: Int, Sendable { case apple7 = 1007 }
public final class MTLArchitecture: Sendable { public var name: String { "" } }
public protocol MTLDevice: AnyObject, Sendable {
    var name: String { get }
    var architecture: MTLArchitecture { get }
    var maxBufferLength: Int { get }
    var recommendedMaxWorkingSetSize: UInt64 { get }
    func supportsFamily(_ gpuFamily: MTLGPUFamily) -> Bool
}
public func MTLCreateSystemDefaultDevice() -> (any MTLDevice)? { nil }
