import SwiftUI

extension View {
    /// With the keys of a number, where keys are on the screen.
    func numberPad() -> some View {
        #if os(iOS)
            keyboardType(.decimalPad)
        #else
            self
        #endif
    }

    /// With a key that ends typing: a number pad has no Return.
    func doneKey(_ action: @escaping () -> Void) -> some View {
        #if os(iOS)
            toolbar {
                ToolbarItemGroup(placement: .keyboard) {
                    Spacer()
                    Button("Done", action: action)
                }
            }
        #else
            self
        #endif
    }

    /// For names that autocorrection would change.
    func plainWords() -> some View {
        #if os(iOS)
            autocorrectionDisabled().textInputAutocapitalization(.never)
        #else
            autocorrectionDisabled()
        #endif
    }

    /// With a small title, where titles are large.
    func inlineTitle() -> some View {
        #if os(iOS)
            navigationBarTitleDisplayMode(.inline)
        #else
            self
        #endif
    }

    /// Over the whole screen.
    func coversScreen() -> some View {
        #if os(iOS)
            ignoresSafeArea().statusBarHidden()
        #else
            self
        #endif
    }

    /// The device does not go to sleep by itself while `wanted`.
    func staysAwake(_ wanted: Bool) -> some View { modifier(Awake(wanted: wanted)) }
}

private struct Awake: ViewModifier {
    let wanted: Bool
    #if os(macOS)
        @State private var activity: (any NSObjectProtocol)?
    #endif

    func body(content: Content) -> some View {
        content.onChange(of: wanted, initial: true) {
            #if os(iOS)
                UIApplication.shared.isIdleTimerDisabled = wanted
            #else
                if let activity { ProcessInfo.processInfo.endActivity(activity) }
                activity =
                    wanted
                    ? ProcessInfo.processInfo.beginActivity(
                        options: [.userInitiated, .idleSystemSleepDisabled],
                        reason: String(localized: "A model is trained.")) : nil
            #endif
        }
    }
}
