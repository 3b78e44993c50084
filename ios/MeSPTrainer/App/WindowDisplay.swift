#if os(iOS)
    import MeSPAppModel
    import SwiftUI

    @MainActor final class WindowDisplay: Display {
        private var screen: UIScreen? {
            UIApplication.shared.connectedScenes.compactMap { $0 as? UIWindowScene }.first?.screen
        }

        var brightness: Double? {
            get { screen.map { Double($0.brightness) } }
            set { if let newValue { screen?.brightness = newValue } }
        }
    }
#endif
