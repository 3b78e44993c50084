// The part of XCTest and XCUIAutomation that the app's UI test uses.

@_exported import Foundation

// developer.apple.com/documentation/xctest/xctestcase, …/xctskip-swift.struct, …/xctattachment
open class XCTestCase: NSObject {
    open func setUpWithError() throws {}
    public func add(_ attachment: XCTAttachment) {}
}
public struct XCTSkip: Error { public init(_ message: String? = nil, file: StaticString = #filePath, line: UInt = #line) {} }
public func XCTAssertTrue(
    _ expression: @autoclosure () throws -> Bool, _ message: @autoclosure () -> String = "",
    file: StaticString = #filePath, line: UInt = #line
) {}
public func XCTAssertFalse(
    _ expression: @autoclosure () throws -> Bool, _ message: @autoclosure () -> String = "",
    file: StaticString = #filePath, line: UInt = #line
) {}
open class XCTAttachment: NSObject {
    @MainActor public convenience init(screenshot: XCUIScreenshot) { self.init(string: "") }
    public init(string: String) {}
    public enum Lifetime: Int, Sendable { case keepAlways, deleteOnSuccess }
    public var name: String?
    public var lifetime = Lifetime.deleteOnSuccess
}

// developer.apple.com/documentation/xcuiautomation/xcuiscreenshot, …/xcuielementquery, …/xcuielement, …/xcuiapplication
@MainActor open class XCUIScreenshot: NSObject {}
@MainActor public protocol XCUIElementTypeQueryProvider {}
extension XCUIElementTypeQueryProvider {
    public var buttons: XCUIElementQuery { fatalError() }
    public var firstMatch: XCUIElement { fatalError() }
    public var navigationBars: XCUIElementQuery { fatalError() }
    public var switches: XCUIElementQuery { fatalError() }
    public var tabBars: XCUIElementQuery { fatalError() }
}
@MainActor open class XCUIElementQuery: NSObject, XCUIElementTypeQueryProvider {
    public func matching(_ predicate: NSPredicate) -> XCUIElementQuery { self }
    public func matching(identifier: String) -> XCUIElementQuery { self }
    public subscript(key: String) -> XCUIElement { fatalError() }
}
@MainActor open class XCUIElement: NSObject, XCUIElementTypeQueryProvider {
    public enum ElementType: UInt, Sendable { case any }
    public var exists: Bool { false }
    public var isEnabled: Bool { false }
    public func descendants(matching type: ElementType) -> XCUIElementQuery { fatalError() }
    public func screenshot() -> XCUIScreenshot { fatalError() }
    public func swipeUp() {}
    public func tap() {}
    public func waitForExistence(timeout: TimeInterval) -> Bool { false }
}
@MainActor open class XCUIApplication: XCUIElement {
    public func launch() {}
    public func performAccessibilityAudit(_ handler: ((XCUIAccessibilityAuditIssue) throws -> Bool)? = nil) throws {}
}
@MainActor open class XCUIAccessibilityAuditIssue: NSObject {
    public var detailedDescription: String { "" }
    public var element: XCUIElement? { nil }
}

// developer.apple.com/documentation/foundation/nspredicate
extension NSPredicate {
    public convenience init(format: String, _ arguments: any CVarArg...) { self.init(value: true) }
}
