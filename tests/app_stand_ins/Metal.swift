// What the core uses of Metal.

// developer.apple.com/documentation/metal/mtldevice, …/mtlgpufamily, …/mtlcreatesystemdefaultdevice()
public enum MTLGPUFamily: Int, Sendable { case apple7 = 1007 }
public protocol MTLDevice: AnyObject, Sendable { func supportsFamily(_ gpuFamily: MTLGPUFamily) -> Bool }
public func MTLCreateSystemDefaultDevice() -> (any MTLDevice)? { nil }
