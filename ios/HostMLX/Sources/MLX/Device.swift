import CHostMLX
import Foundation

public enum DeviceType: String, Hashable, Sendable {
    case cpu
    case gpu

    fileprivate var code: Int32 { self == .gpu ? 1 : 0 }
}

/// The CPU or the GPU.
public final class Device: @unchecked Sendable, Equatable {

    private let type: DeviceType

    /// The device's ordinary stream.
    let defaultStream: Stream

    /// The device; an error if there is no such device.
    public init(_ deviceType: DeviceType, index: Int32 = 0) {
        type = deviceType
        defaultStream = deviceType == .gpu ? .gpu : .cpu
    }

    /// The default device of C++.
    @available(*, deprecated, message: "please use defaultDevice()")
    public convenience init() {
        self.init(host_default_device() == 1 ? .gpu : .cpu)
    }

    public static let cpu: Device = Device(.cpu)

    public static let gpu: Device = Device(.gpu)

    public var deviceType: DeviceType? { type }

    fileprivate var code: Int32 { type.code }

    private static let lock = NSLock()
    nonisolated(unsafe) private static var chosenDevice: Device?

    @TaskLocal private static var taskDevice = initialDevice()

    private static func initialDevice() -> Device {
        lock.withLock { chosenDevice ?? (host_default_device() == 1 ? Device(.gpu) : Device(.cpu)) }
    }

    /// The device that operations run on.
    public static func defaultDevice() -> Device { taskDevice }

    public static func withDefaultDevice<R>(_ device: Device, _ body: () throws -> R) rethrows -> R {
        try $taskDevice.withValue(device, operation: body)
    }

    public static func withDefaultDevice<R>(_ device: Device, _ body: () async throws -> R) async rethrows -> R {
        try await $taskDevice.withValue(device, operation: body)
    }

    static func defaultStream() -> Stream { taskDevice.defaultStream }

    /// Sets the device for all tasks; it has no effect once the default device has been asked for.
    @available(*, deprecated, message: "please use withDefaultDevice()")
    public static func setDefault(device: Device?) {
        lock.withLock {
            if let device {
                initError()
                host_set_default_device(device.code)
            }
            chosenDevice = device
        }
    }

    public static func == (lhs: Device, rhs: Device) -> Bool { lhs.type == rhs.type }
}

extension Device: CustomStringConvertible {
    public var description: String { "Device(\(type.rawValue), 0)" }
}

/// A queue of work on a device.
public final class Stream: @unchecked Sendable, Equatable {

    let ctx: HostStream

    public static let gpu = Stream(defaultOf: .gpu)
    public static let cpu = Stream(defaultOf: .cpu)

    @TaskLocal static var defaultStream: Stream?

    public static func withNewDefaultStream<R>(device: Device? = nil, _ body: () throws -> R) rethrows -> R {
        try $defaultStream.withValue(Stream(device ?? Device.defaultDevice()), operation: body)
    }

    public static func withNewDefaultStream<R>(
        device: Device? = nil, _ body: () async throws -> R
    ) async rethrows -> R {
        try await $defaultStream.withValue(Stream(device ?? Device.defaultDevice()), operation: body)
    }

    private init(defaultOf type: DeviceType) {
        initError()
        var stream = HostStream(device: type.code, index: 0)
        _ = host_default_stream(type.code, &stream)
        ctx = stream
    }

    /// The ordinary stream of the default device.
    public init() {
        ctx = Stream.defaultStream(Device.defaultDevice()).ctx
    }

    /// A new stream.
    public init(_ device: Device) {
        initError()
        var stream = HostStream(device: device.code, index: 0)
        _ = evalLock.withLock { host_new_stream(device.code, &stream) }
        ctx = stream
    }

    /// Waits for the work on the stream.
    public func synchronize() {
        evalLock.withLock { host_synchronize(ctx) }
    }

    public static func defaultStream(_ device: Device) -> Stream {
        device.deviceType == .gpu ? .gpu : .cpu
    }

    public static func == (lhs: Stream, rhs: Stream) -> Bool { lhs.ctx.index == rhs.ctx.index }
}

extension Stream: CustomStringConvertible {
    public var description: String { "Stream(Device(\(ctx.device == 1 ? "gpu" : "cpu"), 0), \(ctx.index))" }
}

/// The device, or the stream of one, that runs an operation.
public struct StreamOrDevice: Sendable, CustomStringConvertible, Equatable {

    public let stream: Stream

    private init(_ stream: Stream) {
        self.stream = stream
    }

    public static var `default`: StreamOrDevice {
        StreamOrDevice(Stream.defaultStream ?? Device.defaultStream())
    }

    public static func device(_ device: Device) -> StreamOrDevice {
        StreamOrDevice(Stream.defaultStream(device))
    }

    public static let cpu = device(.cpu)

    public static let gpu = device(.gpu)

    /// As in mlx-swift 0.31.6, the default device's stream.
    public static func stream(_ stream: Stream) -> StreamOrDevice {
        StreamOrDevice(Device.defaultStream())
    }

    var ctx: HostStream { stream.ctx }

    public var description: String { stream.description }
}
