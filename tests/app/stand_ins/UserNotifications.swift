// The part of UserNotifications that the app uses.

import Foundation

// developer.apple.com/documentation/usernotifications/unauthorizationoptions
public struct UNAuthorizationOptions: OptionSet, Sendable {
    public let rawValue: UInt
    public init(rawValue: UInt) { self.rawValue = rawValue }
    public static let sound = Self(rawValue: 2), alert = Self(rawValue: 4)
}

// developer.apple.com/documentation/usernotifications/unnotificationcontent, …/unnotificationrequest, …/unnotificationtrigger
public class UNNotificationSound: NSObject { public class var `default`: UNNotificationSound { fatalError() } }
open class UNNotificationContent: NSObject {}
public class UNMutableNotificationContent: UNNotificationContent {
    public var title = ""
    public var body = ""
    public var sound: UNNotificationSound?
}
open class UNNotificationTrigger: NSObject {}
public class UNTimeIntervalNotificationTrigger: UNNotificationTrigger {
    public init(timeInterval: TimeInterval, repeats: Bool) {}
}
public class UNNotificationRequest: NSObject {
    public init(identifier: String, content: UNNotificationContent, trigger: UNNotificationTrigger?) {}
}

// developer.apple.com/documentation/usernotifications/unusernotificationcenter
public class UNUserNotificationCenter: NSObject, @unchecked Sendable {
    public class func current() -> UNUserNotificationCenter { fatalError() }
    public func requestAuthorization(
        options: UNAuthorizationOptions, completionHandler: @escaping @Sendable (Bool, (any Error)?) -> Void
    ) {}
    public func add(
        _ request: UNNotificationRequest, withCompletionHandler: (@Sendable ((any Error)?) -> Void)? = nil
    ) {}
    public func removePendingNotificationRequests(withIdentifiers identifiers: [String]) {}
    public func removeDeliveredNotifications(withIdentifiers identifiers: [String]) {}
}
