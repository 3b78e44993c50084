// The part of ActivityKit that the app and its widget use.

import Foundation

// developer.apple.com/documentation/activitykit/activityattributes, …/activitycontent, …/activityuidismissalpolicy
public protocol ActivityAttributes: Decodable, Encodable {
    associatedtype ContentState: Decodable, Encodable, Hashable
}
public struct ActivityContent<State: Codable & Hashable & Sendable>: Sendable {
    public init(state: State, staleDate: Date?, relevanceScore: Double = 0) {}
}
public struct ActivityUIDismissalPolicy: Sendable {
    public static var `default`: Self { .init() }
    public static var immediate: Self { .init() }
}

// developer.apple.com/documentation/activitykit/activity
public struct PushType: Sendable {}
public class Activity<Attributes: ActivityAttributes>: Identifiable where Attributes.ContentState: Sendable {
    public typealias ContentState = Attributes.ContentState
    public var id: String { "" }
    public static var activities: [Activity<Attributes>] { [] }
    public static func request(
        attributes: Attributes, content: ActivityContent<ContentState>, pushType: PushType? = nil
    ) throws -> Activity<Attributes> { fatalError() }
    public func update(_ content: ActivityContent<ContentState>) async {}
    public func end(_ content: ActivityContent<ContentState>?, dismissalPolicy: ActivityUIDismissalPolicy = .default)
        async
    {}
}

// developer.apple.com/documentation/activitykit/activityauthorizationinfo
public final class ActivityAuthorizationInfo {
    public init() {}
    public var areActivitiesEnabled: Bool { true }
}
