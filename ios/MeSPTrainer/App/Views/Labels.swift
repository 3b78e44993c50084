import MeSPAppModel
import SwiftUI

struct TintedLabel: View {
    let text: String
    let systemImage: String
    let tint: Color

    init(_ text: String, systemImage: String, tint: Color) {
        (self.text, self.systemImage, self.tint) = (text, systemImage, tint)
    }

    var body: some View {
        Label {
            Text(text)
        } icon: {
            Image(systemName: systemImage).foregroundStyle(tint).accessibilityHidden(true)
        }
    }
}

struct ProblemLabel: View {
    let text: String

    init(_ text: String) { self.text = text }

    var body: some View { TintedLabel(text, systemImage: "exclamationmark.triangle.fill", tint: .orange) }
}

struct NoticeRows: View {
    let notices: [String]

    var body: some View {
        ForEach(notices, id: \.self) { Label($0, systemImage: "info.circle").font(.footnote) }
    }
}

/// A menu at the end of a row, for people who do not know that rows can be swiped.
struct RowMenu: View {
    let name: String
    let delete: () -> Void

    var body: some View {
        Menu {
            Button("Delete", systemImage: "trash", role: .destructive, action: delete)
        } label: {
            Label("Actions for \(name)", systemImage: "ellipsis.circle").labelStyle(.iconOnly)
        }
        .buttonStyle(.borderless)
    }
}

extension GradientMethod {
    var name: String {
        switch self {
        case .mesp: "MeSP"
        case .mebp: "MeBP"
        case .mezo: "MeZO"
        }
    }
}

extension StoredRun.Status {
    var name: LocalizedStringKey {
        switch self {
        case .running: "Running"
        case .finished: "Finished"
        case .stopped: "Stopped"
        case .failed: "Failed"
        case .interrupted: "Interrupted"
        case .unreadable: "Unreadable"
        }
    }
}

extension Int {
    var bytes: String { formatted(.byteCount(style: .file)) }
}

extension Double {
    var times: String { "\(formatted(.number.precision(.fractionLength(2))))×" }
}

extension URL {
    @MainActor func accessed(_ body: () async -> Void) async {
        let granted = startAccessingSecurityScopedResource()
        await body()
        if granted { stopAccessingSecurityScopedResource() }
    }
}
