import SwiftUI

extension View {
    func numberPad() -> some View {
        #if os(iOS)
            keyboardType(.decimalPad)
        #else
            self
        #endif
    }

    /// Adds a Done button to the keyboard, because a number pad has no Return key.
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

    func plainWords() -> some View {
        #if os(iOS)
            autocorrectionDisabled().textInputAutocapitalization(.never)
        #else
            autocorrectionDisabled()
        #endif
    }

    func inlineTitle() -> some View {
        #if os(iOS)
            navigationBarTitleDisplayMode(.inline)
        #else
            self
        #endif
    }

    func coversScreen() -> some View {
        #if os(iOS)
            ignoresSafeArea().statusBarHidden()
        #else
            self
        #endif
    }

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
                        reason: String(localized: "A model is being trained.")) : nil
            #endif
        }
    }
}
