// The part of Charts that the app uses, with bodies that do nothing: enough to type-check the views.

import SwiftUI

// developer.apple.com/documentation/charts/plottable, …/plottablevalue
public protocol Plottable {}
extension Int: Plottable {}
extension Double: Plottable {}
extension String: Plottable {}
public struct PlottableValue<V: Plottable> {
    public static func value(_ k: LocalizedStringKey, _ v: V) -> PlottableValue { fatalError() }
}

// developer.apple.com/documentation/charts/chartcontent, …/chartcontentbuilder
@MainActor @preconcurrency public protocol ChartContent {}
public struct CC: ChartContent { nonisolated public init() {} }
@resultBuilder public struct ChartContentBuilder {
    public static func buildExpression<C: ChartContent>(_ c: C) -> C { c }
    public static func buildBlock<each C: ChartContent>(_ c: repeat each C) -> CC { CC() }
    public static func buildIf<C: ChartContent>(_ c: C?) -> C? { c }
}

// developer.apple.com/documentation/charts/linemark, …/pointmark, …/rulemark, …/annotationposition
public struct LineMark: ChartContent {
    public init<X: Plottable, Y: Plottable>(x: PlottableValue<X>, y: PlottableValue<Y>) {}
    public init<X: Plottable, Y: Plottable, S: Plottable>(
        x: PlottableValue<X>, y: PlottableValue<Y>, series: PlottableValue<S>
    ) {}
}
public struct PointMark: ChartContent {
    public init<X: Plottable, Y: Plottable>(x: PlottableValue<X>, y: PlottableValue<Y>) {}
}
public struct RuleMark: ChartContent { public init<Y: Plottable>(y: PlottableValue<Y>) {} }
public enum AnnotationPosition { case top }
extension ChartContent {
    public func foregroundStyle<D: Plottable>(by: PlottableValue<D>) -> some ChartContent { self }
    public func lineStyle(_ s: StrokeStyle) -> some ChartContent { self }
    public func annotation<C: View>(
        position: AnnotationPosition, alignment: Alignment = .center, @ViewBuilder content: () -> C
    ) -> some ChartContent { self }
}

// developer.apple.com/documentation/charts/chart, …/scaledomain
public struct Chart<C: ChartContent>: View {
    public init(@ChartContentBuilder content: () -> C) {}
    public var body: Never { fatalError() }
}
extension ForEach: ChartContent where C: ChartContent {}
extension ForEach where C: ChartContent {
    public init(_ d: D, @ChartContentBuilder content: @escaping (D.Element) -> C)
    where D.Element: Identifiable, ID == D.Element.ID { fatalError() }
    public init(_ d: D, id: KeyPath<D.Element, ID>, @ChartContentBuilder content: @escaping (D.Element) -> C) {
        fatalError()
    }
}
public struct Dom { public static func automatic(includesZero: Bool) -> Dom { Dom() } }
extension View { public func chartYScale(domain: Dom) -> some View { self } }
extension Optional: ChartContent where Wrapped: ChartContent {}
