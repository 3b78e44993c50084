// The part of BackgroundTasks that the app uses.

import Foundation

// developer.apple.com/documentation/backgroundtasks/bgtask, …/bgcontinuedprocessingtask; BackgroundTasks/BGTask.h
open class BGTask: NSObject {
    public var identifier: String { "" }
    public var expirationHandler: (() -> Void)?
    public func setTaskCompleted(success: Bool) {}
}
public class BGContinuedProcessingTask: BGTask {
    public var progress: Progress { fatalError() }
    public var title: String { "" }
    public var subtitle: String { "" }
    public func updateTitle(_ title: String, subtitle: String) {}
}

// developer.apple.com/documentation/backgroundtasks/bgtaskrequest, …/bgprocessingtaskrequest, …/bgcontinuedprocessingtaskrequest
open class BGTaskRequest: NSObject {}
public class BGProcessingTaskRequest: BGTaskRequest {
    public init(identifier: String) {}
    public var requiresExternalPower = false
}
public class BGContinuedProcessingTaskRequest: BGTaskRequest {
    public init(identifier: String, title: String, subtitle: String) {}
    public var requiredResources: Resources {
        get { [] }
        set {}
    }

    // developer.apple.com/documentation/backgroundtasks/bgcontinuedprocessingtaskrequest/resources, …/resources/gpu, …/requiredresources
    public struct Resources: OptionSet, Sendable {
        public let rawValue: Int
        public init(rawValue: Int) { self.rawValue = rawValue }
        public static var gpu: Self { Self(rawValue: 1) }
    }
}

// developer.apple.com/documentation/backgroundtasks/bgtaskscheduler, …/bgtaskscheduler/supportedresources
public class BGTaskScheduler: NSObject {
    public class var shared: BGTaskScheduler { fatalError() }
    public class var supportedResources: BGContinuedProcessingTaskRequest.Resources { [] }
    public func register(
        forTaskWithIdentifier identifier: String, using queue: DispatchQueue?,
        launchHandler: @escaping @Sendable (BGTask) -> Void
    ) -> Bool { true }
    public func submit(_ request: BGTaskRequest) throws {}
    public func cancel(taskRequestWithIdentifier identifier: String) {}
}
