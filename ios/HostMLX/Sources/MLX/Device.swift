import CHostMLX
import Foundation

public enum DeviceType: String, Hashable, Sendable {
    case cpu
    case gpu

    fileprivate var code: Int32 { self == .gpu ? 1 : 0 }
}

public final class Device: Sendable, Hashable {

    public let deviceType: DeviceType

    private let index: Int32

    /// Creates a device, even if the machine does not have it.
    public init(_ deviceType: DeviceType, index: Int32 = 0) {
        if deviceType == .cpu { precondition(index == 0) }
        self.deviceType = deviceType
        self.index = index
    }

    public static var cpu: Device { Stream.cpu.device }

    public static var gpu: Device { Stream.gpu.device }

    public static func defaultDevice() -> Device { Stream.defaultDevice }

    public static func withDefaultDevice<R>(_ device: Device, _ body: () throws -> R) rethrows -> R {
        try Stream.withDefaultDevice(device, body)
    }

    /// Sets C++'s default device. Swift's default device changes only if it was not used before.
    @available(
        *, deprecated,
        message: "use withDefaultDevice() -- this only works before any mlx resources are created"
    )
    public static func setDefault(device: Device?) {
        guard let device else { return }
        initError()
        host_set_default_device(device.deviceType.code)
    }

    public static func == (lhs: Device, rhs: Device) -> Bool {
        (lhs.deviceType, lhs.index) == (rhs.deviceType, rhs.index)
    }

    public func hash(into hasher: inout Hasher) {
        hasher.combine(index)
        hasher.combine(deviceType)
    }
}

extension Device: CustomStringConvertible {
    public var description: String { "Device(\(deviceType.rawValue), \(index))" }
}

private final class StreamPromise: @unchecked Sendable {
    let device: Device
    private let lock = NSLock()
    private var made: Stream?

    init(_ device: Device) { self.device = device }

    var current: Stream {
        if let made = lock.withLock({ made }) { return made }
        // The stream is created outside of the lock. Creating it takes `evalLock`, which another thread that waits for the lock may hold.
        let new = Stream(device)
        return lock.withLock {
            made = made ?? new
            return made ?? new
        }
    }
}

private final class StreamPair: Sendable {
    let cpu: StreamPromise
    let gpu: StreamPromise
    let defaultStream: StreamPromise

    init(cpu: StreamPromise, gpu: StreamPromise, defaultType: DeviceType) {
        (self.cpu, self.gpu) = (cpu, gpu)
        defaultStream = defaultType == .cpu ? cpu : gpu
        _ = defaultStream.current
    }
}

/// A queue of work on a device. Any thread may use it, but only one thread at a time.
public final class Stream: @unchecked Sendable, Equatable {

    let ctx: HostStream

    let device: Device

    private static let globalStreams: StreamPair = {
        initError()
        return StreamPair(
            cpu: StreamPromise(Device(.cpu)), gpu: StreamPromise(Device(.gpu)),
            defaultType: host_default_device() == 1 ? .gpu : .cpu)
    }()

    @TaskLocal private static var localStreams: StreamPair?

    private static var streams: StreamPair { localStreams ?? globalStreams }

    public static var gpu: Stream { streams.gpu.current }

    public static var cpu: Stream { streams.cpu.current }

    public static var defaultStream: Stream { streams.defaultStream.current }

    static var defaultDevice: Device { streams.defaultStream.device }

    fileprivate static func withDefaultDevice<R>(_ device: Device, _ body: () throws -> R) rethrows -> R {
        try $localStreams.withValue(streams(device), operation: body)
    }

    /// Returns the current streams with another default device. Only another GPU gets a new stream.
    private static func streams(_ device: Device) -> StreamPair {
        let isOtherGPU = device.deviceType == .gpu && device != streams.gpu.device
        return StreamPair(
            cpu: streams.cpu, gpu: isOtherGPU ? StreamPromise(device) : streams.gpu,
            defaultType: device.deviceType)
    }

    /// Creates a stream. The process ends if MLX cannot create it, for example a GPU's stream on a machine without a GPU.
    public init(_ device: Device) {
        initError()
        var stream = HostStream(device: device.deviceType.code, index: 0)
        guard evalLock.withLock({ host_new_stream(device.deviceType.code, &stream) }) else {
            fatalError("Unable to create stream: \(device)")
        }
        (ctx, self.device) = (stream, device)
    }

    /// Creates a stream for the GPU on a Linux machine without one. Graphs on the stream can be built, but not evaluated. mlx-swift has no such
    /// function.
    public static func makeForMissingGPU() { host_make_gpu_stream() }

    public func synchronize() {
        evalLock.withLock { host_synchronize(ctx) }
    }

    public static func defaultStream(_ deviceType: DeviceType) -> Stream { deviceType == .cpu ? .cpu : .gpu }

    public static func == (lhs: Stream, rhs: Stream) -> Bool { lhs.ctx.index == rhs.ctx.index }
}

extension Stream: CustomStringConvertible {
    public var description: String { "Stream(\(device), \(ctx.index))" }
}

public struct StreamOrDevice: Sendable, CustomStringConvertible, Equatable {

    public let stream: Stream

    private init(_ stream: Stream) {
        self.stream = stream
    }

    public static var `default`: StreamOrDevice { StreamOrDevice(Stream.defaultStream) }

    public static var cpu: StreamOrDevice { .stream(.cpu) }

    public static var gpu: StreamOrDevice { .stream(.gpu) }

    public static func stream(_ stream: Stream) -> StreamOrDevice { StreamOrDevice(stream) }

    var ctx: HostStream { stream.ctx }

    public var description: String { stream.description }
}
