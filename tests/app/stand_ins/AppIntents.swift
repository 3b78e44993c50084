// The part of AppIntents that the app uses.

import Foundation

// developer.apple.com/documentation/foundation/localizedstringresource
public struct LocalizedStringResource: Sendable, ExpressibleByStringLiteral {
    public init(stringLiteral: String) {}
}

// developer.apple.com/documentation/appintents/intentresult, …/intentresult/result(), …/intentresultcontainer
public protocol IntentResult: Sendable {}
public struct IntentResultContainer<Value: Sendable, OpensIntent, Snippet, Dialog>: IntentResult {
    public init() {}
}
extension IntentResult {
    public static func result() -> Self where Self == IntentResultContainer<Never, Never, Never, Never> { Self() }
}

// developer.apple.com/documentation/appintents/appintent, …/progressreportingintent, …/progressreportingintent/progress
public protocol AppIntent: Sendable {
    associatedtype PerformResult: IntentResult
    static var title: LocalizedStringResource { get }
    init()
    func perform() async throws -> PerformResult
}
public protocol ProgressReportingIntent: AppIntent {}
extension ProgressReportingIntent { public var progress: Progress { fatalError() } }

// developer.apple.com/documentation/appintents/longrunningtaskoptions, …/longrunningtaskoptions/requiresgpu
public struct LongRunningTaskOptions: OptionSet, Sendable {
    public let rawValue: Int
    public init(rawValue: Int) { self.rawValue = rawValue }
    public static let requiresGPU = Self(rawValue: 1)
}

// developer.apple.com/documentation/appintents/longrunningintent, …/longrunningintent/performbackgroundtask(options:operation:)
public protocol LongRunningIntent: ProgressReportingIntent {}
extension LongRunningIntent {
    @discardableResult public func performBackgroundTask<T>(
        options: LongRunningTaskOptions = [], operation: @escaping () async throws -> T
    ) async throws -> T { try await operation() }
}
