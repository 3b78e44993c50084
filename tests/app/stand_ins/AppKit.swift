// The part of AppKit that the app uses.

import Foundation

// developer.apple.com/documentation/appkit/nsapplication, …/nsapplicationdelegate
@MainActor open class NSApplication: NSObject {}
@MainActor public protocol NSApplicationDelegate: NSObjectProtocol {
    func applicationShouldTerminateAfterLastWindowClosed(_ sender: NSApplication) -> Bool
}
