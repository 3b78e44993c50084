// The part of SwiftUI that the app uses. Bodies do nothing, because the views are only type-checked. Isolation, labels and constraints follow Apple’s
// interface. Opaque results are less precise.

@_exported import CoreTransferable
@_exported import Darwin
@_exported import Foundation
@_exported import Observation
import UniformTypeIdentifiers

#if os(iOS)
    @_exported import UIKit
#else
    @_exported import AppKit
#endif

// developer.apple.com/documentation/swiftui/view, …/viewbuilder, …/emptyview
@MainActor @preconcurrency public protocol View {
    associatedtype Body: View
    @ViewBuilder @MainActor @preconcurrency var body: Body { get }
}
extension Never: View { public var body: Never { fatalError() } }
public struct Stub: View {
    nonisolated public init() {}
    public var body: Never { fatalError() }
}
public protocol Prim: View where Body == Never {}
extension Prim { public var body: Never { fatalError() } }
public struct EmptyView: Prim { nonisolated public init() {} }
extension Optional: View where Wrapped: View { public var body: Never { fatalError() } }
@resultBuilder public struct ViewBuilder {
    public static func buildBlock() -> EmptyView { EmptyView() }
    public static func buildExpression<C: View>(_ c: C) -> C { c }
    public static func buildBlock<C: View>(_ c: C) -> C { c }
    public static func buildBlock<each C: View>(_ c: repeat each C) -> Stub { Stub() }
    public static func buildIf<C: View>(_ c: C?) -> C? { c }
    public static func buildEither<A: View, B: View>(first: A) -> Cond<A, B> { .init() }
    public static func buildEither<A: View, B: View>(second: B) -> Cond<A, B> { .init() }
}
public struct Cond<A: View, B: View>: Prim { nonisolated init() {} }

// developer.apple.com/documentation/swiftui/scene, …/windowgroup, …/window, …/backgroundtask, …/app
@MainActor @preconcurrency public protocol Scene {
    associatedtype Body: Scene
    @MainActor var body: Body { get }
}
extension Never: Scene {}
#if os(iOS)
    public struct BackgroundTask<Request, Response>: Sendable {
        public static func urlSession(_ identifier: String) -> BackgroundTask<Void, Void>
        where Request == Void, Response == Void { .init() }
    }
    extension Scene {
        public func backgroundTask<D: Sendable, R: Sendable>(
            _ task: BackgroundTask<D, R>, action: @escaping @Sendable (D) async -> R
        ) -> some Scene { self }
    }
#endif
public struct WindowGroup<C: View>: Scene {
    nonisolated public init(@ViewBuilder content: () -> C) {}
    public var body: Never { fatalError() }
}
#if os(macOS)
    public struct Window<C: View>: Scene {
        nonisolated public init(_ title: LocalizedStringKey, id: String, @ViewBuilder content: () -> C) {}
        public var body: Never { fatalError() }
    }

    // developer.apple.com/documentation/swiftui/commands, …/commandgroup, …/commandgroupplacement, …/scene/commands(content:)
    public struct CommandGroupPlacement: Sendable { public static let toolbar = Self() }
    public struct CommandGroup<C: View> {
        nonisolated public init(after group: CommandGroupPlacement, @ViewBuilder addition: () -> C) {}
    }
    extension Scene {
        nonisolated public func commands<C: View>(content: () -> CommandGroup<C>) -> some Scene { self }
    }

    // developer.apple.com/documentation/swiftui/nsapplicationdelegateadaptor
    @MainActor @preconcurrency @propertyWrapper public struct NSApplicationDelegateAdaptor<Delegate>
    where Delegate: NSObject, Delegate: NSApplicationDelegate {
        @MainActor @preconcurrency public init(_ delegateType: Delegate.Type = Delegate.self) {}
        @MainActor @preconcurrency public var wrappedValue: Delegate { fatalError() }
    }
#endif
@MainActor @preconcurrency public protocol App {
    associatedtype Body: Scene
    @MainActor var body: Body { get }
    @MainActor init()
}
extension App { @MainActor public static func main() {} }

// developer.apple.com/documentation/swiftui/state, …/binding, …/bindable
@propertyWrapper public struct State<V> {
    public init(wrappedValue: V) { x = wrappedValue }
    let x: V
    public var wrappedValue: V {
        get { x }
        nonmutating set {}
    }
    public var projectedValue: Binding<V> { fatalError() }
}
@propertyWrapper @dynamicMemberLookup public struct Binding<V> {
    public init(get: @escaping @isolated(any) @Sendable () -> V, set: @escaping @isolated(any) @Sendable (V) -> Void) {
        fatalError()
    }
    public var wrappedValue: V {
        get { fatalError() }
        nonmutating set {}
    }
    public var projectedValue: Binding<V> { self }
    public subscript<S>(dynamicMember k: WritableKeyPath<V, S>) -> Binding<S> { fatalError() }
}
@propertyWrapper @dynamicMemberLookup public struct Bindable<V> {
    public var wrappedValue: V
    public init(wrappedValue: V) { self.wrappedValue = wrappedValue }
    public var projectedValue: Bindable<V> { self }
    public subscript<S>(dynamicMember k: ReferenceWritableKeyPath<V, S>) -> Binding<S> where V: AnyObject {
        fatalError()
    }
}

// developer.apple.com/documentation/swiftui/environment, …/environmentvalues, …/scenephase, …/dismissaction
public enum ScenePhase: Sendable { case background, inactive, active }
public enum UserInterfaceSizeClass: Sendable { case compact, regular }
public enum DynamicTypeSize: Sendable {
    case large
    public var isAccessibilitySize: Bool { false }
}
public struct EnvironmentValues {
    public var scenePhase: ScenePhase { .active }
    public var horizontalSizeClass: UserInterfaceSizeClass? { nil }
    public var dynamicTypeSize: DynamicTypeSize { .large }
    public var dismiss: DismissAction { DismissAction() }
}
@MainActor public struct DismissAction {
    nonisolated init() {}
    public func callAsFunction() {}
}
@propertyWrapper public struct Environment<V> {
    public init(_ k: KeyPath<EnvironmentValues, V>) {}
    public init(_ t: V.Type) where V: AnyObject & Observable {}
    public var wrappedValue: V { fatalError() }
}

// developer.apple.com/documentation/swift/string/init(localized:table:bundle:locale:comment:), developer.apple.com/documentation/swiftui/localizedstringkey
extension String {
    public init(localized: LocalizedStringKey) { self = "" }
}
public struct LocalizedStringKey: ExpressibleByStringInterpolation {
    public init(stringLiteral: String) {}
    public struct StringInterpolation: StringInterpolationProtocol {
        public init(literalCapacity: Int, interpolationCount: Int) {}
        public mutating func appendLiteral(_ s: String) {}
        public mutating func appendInterpolation(_ s: String) {}
        public mutating func appendInterpolation(_ i: Int) {}
    }
    public init(stringInterpolation: StringInterpolation) {}
}

// developer.apple.com/documentation/swiftui/text, …/font, …/image, …/label
public struct Text: Prim, Sendable {
    public init(_ k: LocalizedStringKey) {}
    @_disfavoredOverload public init<S: StringProtocol>(_ s: S) {}
    public init<F: FormatStyle>(_ i: F.FormatInput, format: F)
    where F.FormatInput: Equatable, F.FormatOutput == String {}
    public func font(_ f: Font?) -> Text { self }
    public func monospacedDigit() -> Text { self }
    public init(verbatim s: String) {}
    public func bold() -> Text { self }
    public func italic() -> Text { self }
    public func foregroundStyle<S: ShapeStyle>(_ s: S) -> Text { self }
    public static func + (a: Text, b: Text) -> Text { a }
}
public struct Font: Sendable {
    public static let title2 = Font(), footnote = Font(), caption = Font(), caption2 = Font(), headline = Font(),
        callout = Font()
}
public struct Image: Prim { public init(systemName: String) {} }
public struct Label<T: View, I: View>: Prim {
    public init(_ k: LocalizedStringKey, systemImage: String) where T == Text, I == Image {}
    @_disfavoredOverload public init<S: StringProtocol>(_ s: S, systemImage: String) where T == Text, I == Image {}
    public init(@ViewBuilder title: () -> T, @ViewBuilder icon: () -> I) {}
}

// developer.apple.com/documentation/swiftui/button, …/buttonrole, …/tabview, …/navigationstack, …/navigationlink
public struct ButtonRole: Sendable { public static let destructive = ButtonRole(), cancel = ButtonRole() }
public struct Button<L: View>: Prim {
    public init(action: @escaping @MainActor () -> Void, @ViewBuilder label: () -> L) {}
    public init(_ k: LocalizedStringKey, action: @escaping @MainActor () -> Void) where L == Text {}
    public init(_ k: LocalizedStringKey, role: ButtonRole?, action: @escaping @MainActor () -> Void)
    where L == Text {}
    public init(_ k: LocalizedStringKey, systemImage: String, action: @escaping @MainActor () -> Void)
    where L == Label<Text, Image> {}
    public init(
        _ k: LocalizedStringKey, systemImage: String, role: ButtonRole?, action: @escaping @MainActor () -> Void
    ) where L == Label<Text, Image> {}
}
public struct TabView<C: View>: Prim {
    public init<S: Hashable>(selection: Binding<S>, @ViewBuilder content: () -> C) {}
}
public struct NavigationStack<C: View>: Prim {
    public init(@ViewBuilder root: () -> C) {}
    public init<D: MutableCollection & RandomAccessCollection & RangeReplaceableCollection>(
        path: Binding<D>, @ViewBuilder root: () -> C
    ) where D.Element: Hashable {}
}
public struct NavigationLink<C: View>: Prim {
    public init<V: Hashable>(value: V?, @ViewBuilder label: () -> C) {}
    public init<D: View>(_ k: LocalizedStringKey, @ViewBuilder destination: () -> D) where C == Text {}
}

// developer.apple.com/documentation/swiftui/form, …/list, …/section, …/foreach, …/dynamicviewcontent
public struct Form<C: View>: Prim { public init(@ViewBuilder content: () -> C) {} }
public struct List<C: View>: Prim { public init(@ViewBuilder content: () -> C) {} }
public struct Section<P: View, C: View, F: View>: Prim {
    public init(_ k: LocalizedStringKey, @ViewBuilder content: () -> C) where P == Text, F == EmptyView {}
    public init(@ViewBuilder content: () -> C) where P == EmptyView, F == EmptyView {}
    public init(@ViewBuilder content: () -> C, @ViewBuilder footer: () -> F) where P == EmptyView {}
    public init(@ViewBuilder content: () -> C, @ViewBuilder header: () -> P, @ViewBuilder footer: () -> F) {}
}
public struct ForEach<D: RandomAccessCollection, ID: Hashable, C> {}
public protocol DynamicViewContent: View {}
extension ForEach: View where C: View { public var body: Never { fatalError() } }
extension ForEach: DynamicViewContent where C: View {}
extension ForEach where C: View {
    public init(_ d: D, @ViewBuilder content: @escaping (D.Element) -> C)
    where D.Element: Identifiable, ID == D.Element.ID { fatalError() }
    public init(_ d: D, id: KeyPath<D.Element, ID>, @ViewBuilder content: @escaping (D.Element) -> C) { fatalError() }
}

// developer.apple.com/documentation/swiftui/picker, …/toggle, …/stepper, …/slider, …/textfield, …/texteditor, …/labeledcontent, …/progressview
public struct Picker<L: View, S: Hashable, C: View>: Prim {
    public init(_ k: LocalizedStringKey, selection: Binding<S>, @ViewBuilder content: () -> C) where L == Text {}
}
public struct Toggle<L: View>: Prim { public init(_ k: LocalizedStringKey, isOn: Binding<Bool>) where L == Text {} }
public struct Stepper<L: View>: Prim {
    public init<V: Strideable>(_ k: LocalizedStringKey, value: Binding<V>, in: ClosedRange<V>, step: V.Stride = 1)
    where L == Text {}
}
public struct Slider: Prim {
    public init<V: BinaryFloatingPoint>(value: Binding<V>, in: ClosedRange<V>) where V.Stride: BinaryFloatingPoint {}
}
public struct TextField<L: View>: Prim {
    public init(_ k: LocalizedStringKey, text: Binding<String>, axis: Axis) where L == Text {}
    public init(_ k: LocalizedStringKey, text: Binding<String>) where L == Text {}
}
public enum Axis {
    case horizontal, vertical
    public struct Set: OptionSet, Sendable {
        public let rawValue: Int8
        public init(rawValue: Int8) { self.rawValue = rawValue }
        public static let horizontal = Set(rawValue: 1)
    }
}
public struct TextEditor: Prim { public init(text: Binding<String>) {} }
public struct LabeledContent<L: View, C: View>: Prim {
    public init<S: StringProtocol>(_ k: LocalizedStringKey, value: S) where L == Text, C == Text {}
    public init(_ k: LocalizedStringKey, @ViewBuilder content: () -> C) where L == Text {}
}
public struct ProgressView<L: View>: Prim {
    public init() where L == EmptyView {}
    public init(_ k: LocalizedStringKey) where L == Text {}
    public init<V: BinaryFloatingPoint>(_ k: LocalizedStringKey, value: V?, total: V = 1) where L == Text {}
    public init<V: BinaryFloatingPoint>(value: V?, total: V = 1) where L == EmptyView {}
    public init<V: BinaryFloatingPoint>(value: V?, total: V = 1, @ViewBuilder label: () -> L) {}
    public init<V: BinaryFloatingPoint, W: View>(
        value: V?, total: V = 1, @ViewBuilder label: () -> L, @ViewBuilder currentValueLabel: () -> W
    ) {}
}

// developer.apple.com/documentation/swiftui/contentunavailableview, …/disclosuregroup, …/spacer, …/divider, …/hstack, …/vstack, …/grid, …/anylayout
public struct ContentUnavailableView: Prim {
    public init(_ k: LocalizedStringKey, systemImage: String, description: Text? = nil) {}
}
public struct DisclosureGroup<C: View>: Prim {
    public init(_ k: LocalizedStringKey, @ViewBuilder content: @escaping () -> C) {}
}
public struct Spacer: Prim { public init() {} }
public struct Divider: Prim { public init() {} }
public enum HorizontalAlignment: Sendable { case leading, center, trailing }
public enum VerticalAlignment: Sendable { case top, center }
public struct Alignment: Sendable {
    public static let leading = Alignment(), trailing = Alignment(), center = Alignment()
}
public struct HStack<C: View>: Prim {
    public init(alignment: VerticalAlignment = .center, spacing: CGFloat? = nil, @ViewBuilder content: () -> C) {}
}
public struct VStack<C: View>: Prim {
    public init(alignment: HorizontalAlignment = .center, spacing: CGFloat? = nil, @ViewBuilder content: () -> C) {}
}
public struct Grid<C: View>: Prim {
    public init(
        alignment: Alignment = .center, horizontalSpacing: CGFloat? = nil, verticalSpacing: CGFloat? = nil,
        @ViewBuilder content: () -> C
    ) {}
}
public struct GridRow<C: View>: Prim { public init(@ViewBuilder content: () -> C) {} }
public protocol Layout {}
public struct HStackLayout: Layout { public init(alignment: VerticalAlignment = .center, spacing: CGFloat? = nil) {} }
public struct VStackLayout: Layout { public init(alignment: HorizontalAlignment = .center, spacing: CGFloat? = nil) {} }
public struct AnyLayout: Layout {
    public init<L: Layout>(_ l: L) {}
    public func callAsFunction<V: View>(@ViewBuilder _ c: () -> V) -> some View { Stub() }
}

// developer.apple.com/documentation/swiftui/sharelink, …/sharepreview, …/link
public struct SharePreview {
    public init(_ k: LocalizedStringKey) {}
    @_disfavoredOverload public init<S: StringProtocol>(_ s: S) {}
}
public struct Link<L: View>: Prim {
    public init<S: StringProtocol>(_ title: S, destination: URL) where L == Text {}
}
public struct ShareLink<L: View>: Prim {
    public init<I: Transferable>(
        item: I, subject: Text? = nil, message: Text? = nil, preview: SharePreview, @ViewBuilder label: () -> L
    ) {}
    public init(_ k: LocalizedStringKey, item: URL) where L == Text {}
}

// developer.apple.com/documentation/swiftui/color, …/shapestyle, …/shape, …/primitivebuttonstyle, …/progressviewstyle, …/labelstyle, …/toolbaritem
public struct Color: Prim, ShapeStyle, Sendable { public static var primary: Color { fatalError() } }
public protocol ShapeStyle: Sendable {}
extension ShapeStyle where Self == Color {
    public static var green: Color { fatalError() }
    public static var orange: Color { fatalError() }
    public static var red: Color { fatalError() }
    public static var gray: Color { fatalError() }
    public static var black: Color { fatalError() }
}
public struct Hier: ShapeStyle {}
extension ShapeStyle where Self == Hier { public static var secondary: Hier { fatalError() } }
public protocol Shape: Sendable {}
public struct Rectangle: Shape {}
extension Shape where Self == Rectangle { public static var rect: Rectangle { fatalError() } }
public protocol PrimitiveButtonStyle {}
public struct BStyle: PrimitiveButtonStyle {}
extension PrimitiveButtonStyle where Self == BStyle {
    public static var bordered: BStyle { fatalError() }
    public static var borderedProminent: BStyle { fatalError() }
    public static var borderless: BStyle { fatalError() }
    public static var plain: BStyle { fatalError() }
}
public protocol ProgressViewStyle {}
public struct CircularProgressViewStyle: ProgressViewStyle {}
extension ProgressViewStyle where Self == CircularProgressViewStyle {
    public static var circular: CircularProgressViewStyle { .init() }
}
public protocol FormStyle {}
public struct GroupedFormStyle: FormStyle {}
extension FormStyle where Self == GroupedFormStyle { public static var grouped: GroupedFormStyle { .init() } }
public struct KeyEquivalent: Sendable, ExpressibleByExtendedGraphemeClusterLiteral {
    public init(extendedGraphemeClusterLiteral: Character) {}
}
public protocol LabelStyle {}
public struct IconOnlyLabelStyle: LabelStyle {}
extension LabelStyle where Self == IconOnlyLabelStyle { public static var iconOnly: IconOnlyLabelStyle { .init() } }
public struct ToolbarItemPlacement {
    public static let cancellationAction = Self(), confirmationAction = Self(), keyboard = Self()
}
public struct ToolbarItem<C: View>: Prim {
    public init(placement: ToolbarItemPlacement, @ViewBuilder content: () -> C) {}
}
public enum ScrollDismissesKeyboardMode { case interactively }
public enum UIKeyboardType { case decimalPad }
public enum TextAlignment { case trailing }
public struct AccessibilityChildBehavior { public static let combine = AccessibilityChildBehavior() }
public enum Visibility { case visible }
public struct TextInputAutocapitalization { public static var never: Self { .init() } }
public enum TitleDisplayMode { case inline }
public struct TextSel { public static let enabled = TextSel() }
public struct StrokeStyle { public init(lineWidth: CGFloat = 1, dash: [CGFloat] = []) {} }
// developer.apple.com/documentation/swiftui/focusstate, …/view/focused(_:) and …/view/focused(_:equals:): iOS 15, macOS 12.
@propertyWrapper public struct FocusState<V: Hashable> {
    public struct Binding {
        public var wrappedValue: V {
            get { fatalError() }
            nonmutating set {}
        }
        public var projectedValue: Binding { self }
    }
    public init() where V == Bool {}
    public init<T: Hashable>() where V == T? {}
    public var wrappedValue: V {
        get { fatalError() }
        nonmutating set {}
    }
    public var projectedValue: Binding { fatalError() }
}
// developer.apple.com/documentation/swiftui/menu/init(content:label:): iOS 14, macOS 11.
public struct Menu<L: View, C: View>: Prim {
    public init(@ViewBuilder content: () -> C, @ViewBuilder label: () -> L) {}
}
// developer.apple.com/documentation/swiftui/viewthatfits: iOS 16, macOS 13.
public struct ViewThatFits<C: View>: Prim { public init(in axes: Axis.Set, @ViewBuilder content: () -> C) {} }
// developer.apple.com/documentation/swiftui/toolbaritemgroup: iOS 14, macOS 11. …/toolbaritemplacement/keyboard: iOS 15, macOS 12.
public struct ToolbarItemGroup<C: View>: Prim {
    public init(placement: ToolbarItemPlacement, @ViewBuilder content: () -> C) {}
}
// developer.apple.com/documentation/swiftui/view/safeareainset(edge:alignment:spacing:content:), …/shapestyle/bar: iOS 15, macOS 12.
// …/view/controlsize(_:) with `large`: iOS 15, macOS 11.
public enum VerticalEdge: Sendable { case top, bottom }
public enum ControlSize: Sendable { case mini, small, regular, large }
public struct BackgroundBar: ShapeStyle {}
extension ShapeStyle where Self == BackgroundBar { public static var bar: BackgroundBar { .init() } }

// developer.apple.com/documentation/swiftui/view-configuration, …/view-layout, …/view-input-and-events, …/view-presentation, …/view-accessibility
extension View {
    public func focused<V: Hashable>(_ b: FocusState<V>.Binding, equals: V) -> some View { self }
    public func focused(_ c: FocusState<Bool>.Binding) -> some View { self }
    public func safeAreaInset<V: View>(
        edge: VerticalEdge, alignment: HorizontalAlignment = .center, spacing: CGFloat? = nil,
        @ViewBuilder content: () -> V
    ) -> some View { self }
    public func controlSize(_ c: ControlSize) -> some View { self }
    public func contextMenu<M: View>(@ViewBuilder menuItems: () -> M) -> some View { self }
    public func accessibilityHidden(_ h: Bool) -> some View { self }
    public func modifier<M: ViewModifier>(_ m: M) -> some View { self }
    public func environment<T: AnyObject & Observable>(_ o: T?) -> some View { self }
    public func tabItem<V: View>(@ViewBuilder _ l: () -> V) -> some View { self }
    public func overlay<V: View>(alignment: Alignment = .center, @ViewBuilder content: () -> V) -> some View { self }
    public func alert<A: View, M: View>(
        _ k: LocalizedStringKey, isPresented: Binding<Bool>, @ViewBuilder actions: () -> A,
        @ViewBuilder message: () -> M
    ) -> some View { self }
    public func confirmationDialog<S: StringProtocol, A: View>(
        _ title: S, isPresented: Binding<Bool>, titleVisibility: Visibility, @ViewBuilder actions: () -> A
    ) -> some View { self }
    public func task(_ a: @escaping @MainActor () async -> Void) -> some View { self }
    public func task<T: Equatable>(id: T, _ a: @escaping @MainActor () async -> Void) -> some View { self }
    public func onOpenURL(perform: @escaping (URL) -> Void) -> some View { self }
    public func onChange<V: Equatable>(of: V, initial: Bool = false, _ a: @escaping () -> Void) -> some View { self }
    public func navigationTitle(_ k: LocalizedStringKey) -> some View { self }
    @_disfavoredOverload public func navigationTitle<S: StringProtocol>(_ k: S) -> some View { self }
    public func navigationDestination<D: Hashable, C: View>(for: D.Type, @ViewBuilder destination: @escaping (D) -> C)
        -> some View
    { self }
    public func scrollDismissesKeyboard(_ m: ScrollDismissesKeyboardMode) -> some View { self }
    public func fileImporter(
        isPresented: Binding<Bool>, allowedContentTypes: [UniformTypeIdentifiers.UTType],
        onCompletion: @escaping (Result<URL, any Error>) -> Void
    ) -> some View { self }
    public func autocorrectionDisabled(_ d: Bool = true) -> some View { self }
    public func onSubmit(_ a: @escaping () -> Void) -> some View { self }
    public func sheet<I: Identifiable, C: View>(item: Binding<I?>, @ViewBuilder content: @escaping (I) -> C)
        -> some View
    { self }
    public func formStyle<S: FormStyle>(_ s: S) -> some View { self }
    public func keyboardShortcut(_ key: KeyEquivalent) -> some View { self }
    public func labelStyle<S: LabelStyle>(_ s: S) -> some View { self }
    public func progressViewStyle<S: ProgressViewStyle>(_ s: S) -> some View { self }
    public func padding() -> some View { self }
    public func toolbar<C: View>(@ViewBuilder content: () -> C) -> some View { self }
    public func frame(width: CGFloat? = nil, height: CGFloat? = nil, alignment: Alignment = .center) -> some View {
        self
    }
    public func frame(
        minWidth: CGFloat? = nil, maxWidth: CGFloat? = nil, minHeight: CGFloat? = nil, maxHeight: CGFloat? = nil,
        alignment: Alignment = .center
    ) -> some View { self }
    public func foregroundStyle<S: ShapeStyle>(_ s: S) -> some View { self }
    public func buttonStyle<S: PrimitiveButtonStyle>(_ s: S) -> some View { self }
    public func disabled(_ d: Bool) -> some View { self }
    public func deleteDisabled(_ d: Bool) -> some View { self }
    public func tag<V: Hashable>(_ t: V) -> some View { self }
    public func multilineTextAlignment(_ a: TextAlignment) -> some View { self }
    public func lineLimit(_ r: ClosedRange<Int>) -> some View { self }
    public func font(_ f: Font?) -> some View { self }
    public func monospacedDigit() -> some View { self }
    public func textSelection(_ t: TextSel) -> some View { self }
    public func background<S: ShapeStyle>(_ s: S) -> some View { self }
    public func ignoresSafeArea() -> some View { self }
    public func contentShape<S: Shape>(_ s: S) -> some View { self }
    public func onAppear(perform: (() -> Void)? = nil) -> some View { self }
    public func refreshable(action: @escaping @Sendable () async -> Void) -> some View { self }
    public func accessibilityLabel(_ k: LocalizedStringKey) -> some View { self }
    @_disfavoredOverload public func accessibilityLabel<S: StringProtocol>(_ s: S) -> some View { self }
    public func accessibilityHint(_ k: LocalizedStringKey) -> some View { self }
    public func accessibilityIdentifier(_ i: String) -> some View { self }
    public func accessibilityValue<S: StringProtocol>(_ k: S) -> some View { self }
    public func accessibilityElement(children: AccessibilityChildBehavior) -> some View { self }
    public func gridColumnAlignment(_ a: HorizontalAlignment) -> some View { self }
}
extension DynamicViewContent {
    public func onDelete(perform: ((IndexSet) -> Void)?) -> some DynamicViewContent { self }
}
#if os(iOS)
    extension View {
        public func navigationBarTitleDisplayMode(_ m: TitleDisplayMode) -> some View { self }
        public func keyboardType(_ k: UIKeyboardType) -> some View { self }
        public func textInputAutocapitalization(_ a: TextInputAutocapitalization?) -> some View { self }
        public func statusBarHidden(_ h: Bool = true) -> some View { self }
    }
#endif

// developer.apple.com/documentation/swiftui/viewmodifier
public struct Modified: Prim {}
@MainActor @preconcurrency public protocol ViewModifier {
    associatedtype Body: View
    typealias Content = Modified
    @ViewBuilder func body(content: Content) -> Body
}
