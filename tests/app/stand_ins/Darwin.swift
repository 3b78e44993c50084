// The part of Darwin beyond POSIX that the package and the app use, and the parts of Foundation and Dispatch that only Apple’s systems have. This
// module makes `canImport(Darwin)` true.

import Foundation
import FoundationNetworking
@_exported import Glibc

// mach/mach_types.h, mach/port.h, mach/message.h, mach/kern_return.h, mach/task_info.h, sys/fcntl.h and others
public typealias mach_port_t = UInt32
public typealias mach_port_name_t = UInt32
public typealias mach_msg_type_number_t = UInt32
public typealias natural_t = UInt32
public typealias integer_t = Int32
public typealias task_flavor_t = UInt32
public typealias kern_return_t = Int32
public let KERN_SUCCESS: Int32 = 0
public let TASK_VM_INFO: Int32 = 22
public let F_FULLFSYNC: Int32 = 51
public struct task_vm_info_data_t {
    public var phys_footprint: UInt64 = 0
    public var ledger_phys_footprint_peak: Int64 = 0
    public init() {}
}
// mach/mach_init.h, mach/mach_traps.h, mach/task.h. `mach_task_self_` is as in the SDKs before Xcode 16.3.
public var mach_task_self_: mach_port_t = 0
public func task_self_trap() -> mach_port_name_t { 0 }
public func task_info(
    _ task: mach_port_name_t, _ flavor: task_flavor_t, _ info: UnsafeMutablePointer<integer_t>!,
    _ count: UnsafeMutablePointer<mach_msg_type_number_t>!
) -> kern_return_t { 0 }

// pthread/qos.h, sys/qos.h
public struct qos_class_t: Sendable {}
public let QOS_CLASS_USER_INITIATED = qos_class_t()
public let QOS_CLASS_UTILITY = qos_class_t()
@discardableResult public func pthread_set_qos_class_self_np(_ qos: qos_class_t, _ priority: Int32) -> Int32 { 0 }

// sys/stat.h
extension stat { public var st_mtimespec: timespec { st_mtim } }

// developer.apple.com/documentation/foundation/processinfo/thermalstate-swift.enum
extension ProcessInfo {
    public enum ThermalState: Int, Sendable { case nominal, fair, serious, critical }
    public var thermalState: ThermalState { .nominal }
}

// developer.apple.com/documentation/dispatch/dispatchsource/makememorypressuresource(eventmask:queue:), …/dispatchsourceprotocol
public protocol DispatchSourceMemoryPressure: DispatchSourceProtocol {}
extension DispatchSourceMemoryPressure {
    // Unlike on Linux, Apple’s declaration does not fix the isolation of the handler. Swift 6 adds a check to an isolated handler, and the check
    // traps on another queue.
    public func setEventHandler(
        qos: DispatchQoS = .unspecified, flags: DispatchWorkItemFlags = [], handler: DispatchSourceHandler?
    ) {}
}
extension DispatchSource {
    public struct MemoryPressureEvent: OptionSet, Sendable {
        public let rawValue: UInt
        public init(rawValue: UInt) { self.rawValue = rawValue }
        public static let warning = Self(rawValue: 2), critical = Self(rawValue: 4)
    }
    public class func makeMemoryPressureSource(
        eventMask: MemoryPressureEvent, queue: DispatchQueue?
    ) -> any DispatchSourceMemoryPressure { fatalError() }
}

// developer.apple.com/documentation/foundation/urlresourcevalues/volumeavailablecapacityforimportantusage
extension URLResourceKey {
    public static let volumeAvailableCapacityForImportantUsageKey = URLResourceKey(rawValue: "importantUsage")
}
extension URLResourceValues { public var volumeAvailableCapacityForImportantUsage: Int64? { nil } }
// developer.apple.com/documentation/foundation/processinfo/thermalstatedidchangenotification
extension ProcessInfo { public static let thermalStateDidChangeNotification = Notification.Name("t") }
// developer.apple.com/documentation/foundation/processinfo/islowpowermodeenabled
extension ProcessInfo { public var isLowPowerModeEnabled: Bool { false } }
extension Notification.Name { public static let NSProcessInfoPowerStateDidChange = Notification.Name("p") }

// developer.apple.com/documentation/foundation/url, …/nsfilecoordinator
extension URL {
    public func startAccessingSecurityScopedResource() -> Bool { true }
    public func stopAccessingSecurityScopedResource() {}
}
public class NSFileCoordinator {
    public init() {}
    public struct ReadingOptions: Sendable { public static let forUploading = ReadingOptions() }
    public func coordinate(
        readingItemAt: URL, options: ReadingOptions, error: UnsafeMutablePointer<NSError?>?, byAccessor: (URL) -> Void
    ) {}
}
extension URL { public static var documentsDirectory: URL { fatalError() } }

// developer.apple.com/documentation/foundation/processinfo/activityoptions, …/beginactivity(options:reason:)
extension ProcessInfo {
    public struct ActivityOptions: OptionSet, Sendable {
        public let rawValue: UInt64
        public init(rawValue: UInt64) { self.rawValue = rawValue }
        public static let userInitiated = Self(rawValue: 1), idleSystemSleepDisabled = Self(rawValue: 2)
    }
    public func beginActivity(options: ActivityOptions, reason: String) -> any NSObjectProtocol { fatalError() }
    public func endActivity(_ activity: any NSObjectProtocol) {}
}

// developer.apple.com/documentation/foundation/urlsessionconfiguration, …/urlerror/downloadtaskresumedata
extension URLSessionConfiguration {
    public class func background(withIdentifier identifier: String) -> URLSessionConfiguration { fatalError() }
    public var sessionSendsLaunchEvents: Bool {
        get { true }
        set {}
    }
    public var allowsExpensiveNetworkAccess: Bool {
        get { true }
        set {}
    }
    public var allowsConstrainedNetworkAccess: Bool {
        get { true }
        set {}
    }
}
extension URLError { public var downloadTaskResumeData: Data? { nil } }

// developer.apple.com/documentation/foundation/urlrequest/allowsexpensivenetworkaccess, …/allowsconstrainednetworkaccess
extension URLRequest {
    public var allowsExpensiveNetworkAccess: Bool {
        get { true }
        set {}
    }
    public var allowsConstrainedNetworkAccess: Bool {
        get { true }
        set {}
    }
}

// developer.apple.com/documentation/foundation/urlerror/networkunavailablereason-swift.property, …/networkunavailablereason-swift.enum
extension URLError {
    public enum NetworkUnavailableReason: Sendable { case expensive, constrained }
    public var networkUnavailableReason: NetworkUnavailableReason? { nil }
}
