// The part of WidgetKit that the app's widget uses, and SwiftUI's declarations for widgets.

import ActivityKit
import SwiftUI

// developer.apple.com/documentation/swiftui/widget, …/widgetconfiguration
@MainActor @preconcurrency public protocol WidgetConfiguration {
    associatedtype Body: WidgetConfiguration
    @MainActor var body: Body { get }
}
extension Never: WidgetConfiguration {}
@MainActor @preconcurrency public protocol Widget {
    associatedtype Body: WidgetConfiguration
    @MainActor var body: Body { get }
    @MainActor init()
}
extension Widget { @MainActor public static func main() {} }

// developer.apple.com/documentation/widgetkit/activityviewcontext, …/activityconfiguration
public struct ActivityViewContext<Attributes: ActivityAttributes> {
    public var attributes: Attributes { fatalError() }
    public var state: Attributes.ContentState { fatalError() }
    public var isStale: Bool { false }
}
public struct ActivityConfiguration<Attributes: ActivityAttributes>: WidgetConfiguration {
    public init<C: View>(
        for attributes: Attributes.Type,
        @ViewBuilder content: @escaping (ActivityViewContext<Attributes>) -> C,
        dynamicIsland: @escaping (ActivityViewContext<Attributes>) -> DynamicIsland
    ) {}
    public var body: Never { fatalError() }
}

// developer.apple.com/documentation/widgetkit/dynamicisland, …/dynamicislandexpandedregion
public struct DynamicIslandExpandedRegionPosition: Sendable {
    public static let center = Self(), bottom = Self()
}
public struct DynamicIslandExpandedRegion<C: View> {
    @MainActor public init(
        _ position: DynamicIslandExpandedRegionPosition, priority: Double = 0, @ViewBuilder content: @escaping () -> C
    ) {}
}
public struct DynamicIslandExpandedContent<C> {}
@resultBuilder public struct DynamicIslandExpandedContentBuilder {
    public static func buildExpression<C: View>(_ c: DynamicIslandExpandedRegion<C>) -> DynamicIslandExpandedRegion<C> {
        c
    }
    public static func buildBlock<each C: View>(_ c: repeat DynamicIslandExpandedRegion<each C>)
        -> DynamicIslandExpandedContent<Never>
    { .init() }
}
public struct DynamicIsland {
    @MainActor public init<L: View, T: View, M: View>(
        @DynamicIslandExpandedContentBuilder expanded: @escaping () -> DynamicIslandExpandedContent<Never>,
        @ViewBuilder compactLeading: @escaping () -> L, @ViewBuilder compactTrailing: @escaping () -> T,
        @ViewBuilder minimal: @escaping () -> M
    ) {}
}
