import CoreTransferable
import MeSPAppModel
import MeSPCore
import SwiftUI
import UniformTypeIdentifiers

extension UTType {
    /// As Info.plist declares it.
    static let mespBundle = UTType(exportedAs: "org.mesp.bundle")
}

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

    /// For names that no keyboard knows better.
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

/// A sentence beside a symbol. The symbol alone has the color, so that the text stays legible.
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

/// A problem that occurred, or prevents an action.
struct ProblemLabel: View {
    let text: String

    init(_ text: String) { self.text = text }

    var body: some View { TintedLabel(text, systemImage: "exclamationmark.triangle.fill", tint: .orange) }
}

/// Notices on a person's data, a row each.
struct NoticeRows: View {
    let notices: [Sentence]

    var body: some View {
        ForEach(notices, id: \.english) { Label($0.localized, systemImage: "info.circle").font(.footnote) }
    }
}

/// A menu at the end of a row, for those who do not know that rows can be swiped.
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
    /// As a size, in units of a thousand.
    var bytes: String { formatted(.byteCount(style: .file)) }
}

extension Double {
    /// As a multiple.
    var times: String { "\(formatted(.number.precision(.fractionLength(2))))×" }
}

extension URL {
    /// Runs `body` with access to what the person chose outside of the app's folders.
    @MainActor func accessed(_ body: () async -> Void) async {
        let granted = startAccessingSecurityScopedResource()
        await body()
        if granted { stopAccessingSecurityScopedResource() }
    }
}

/// A run to share, as a ZIP file of its log and adapters, or of the adapters alone.
struct Archive: Transferable {
    let run: StoredRun
    var adaptersOnly = false

    private var name: String { adaptersOnly ? "\(run.name) adapters" : run.name }

    static var transferRepresentation: some TransferRepresentation {
        FileRepresentation(exportedContentType: .zip) { (archive: Archive) in
            SentTransferredFile(try archive.zipped())
        }
        .suggestedFileName { (archive: Archive) in "\(archive.name).zip" }
    }

    private func zipped() throws -> URL {
        let export = URL.temporaryDirectory.appending(path: name)
        try run.export(to: export)
        return try (adaptersOnly ? export.appending(path: "adapters") : export).zipped(as: name)
    }
}

/// The reports of self-checks and the logs of runs, to share as a ZIP file.
struct Measurements: Transferable {
    let folder: DocumentsFolder

    static let name = "MeSP measurements"

    static var transferRepresentation: some TransferRepresentation {
        FileRepresentation(exportedContentType: .zip) { (measurements: Measurements) in
            let export = URL.temporaryDirectory.appending(path: name)
            try measurements.folder.exportMeasurements(to: export)
            return SentTransferredFile(try export.zipped(as: name))
        }
        .suggestedFileName("\(name).zip")
    }
}

extension URL {
    /// A ZIP file of this folder, in the folder for temporary files. The file coordinator zips a folder that is read for uploading; its
    /// file goes when the closure returns.
    fileprivate func zipped(as name: String) throws -> URL {
        let target = URL.temporaryDirectory.appending(path: "\(name).zip")
        var coordination: NSError?
        var failure: (any Error)?
        NSFileCoordinator().coordinate(readingItemAt: self, options: .forUploading, error: &coordination) { zip in
            do {
                try? FileManager.default.removeItem(at: target)
                try FileManager.default.copyItem(at: zip, to: target)
            } catch {
                failure = error
            }
        }
        if let error = coordination ?? failure { throw error }
        return target
    }
}
