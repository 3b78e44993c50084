import CoreTransferable
import MeSPAppModel
import SwiftUI
import UniformTypeIdentifiers

extension UTType {
    /// The type of bundles, as Info.plist declares it.
    static let mespBundle = UTType(exportedAs: "org.mesp.bundle")
}

/// A run to share, as a ZIP file of its log and adapters, or of the adapters only.
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
    /// Returns a ZIP file of this folder, in the folder for temporary files. The file coordinator zips a folder that is read for uploading, and
    /// deletes its file when the closure returns. So the file is copied.
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
