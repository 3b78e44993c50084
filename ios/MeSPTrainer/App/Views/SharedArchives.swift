import CoreTransferable
import MeSPAppModel
import SwiftUI
import UniformTypeIdentifiers

extension UTType {
    static let mespBundle = UTType(exportedAs: "org.mesp.bundle")
}

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
    /// Zips this folder into the temporary directory.
    ///
    /// A coordinated read with `.forUploading` creates a ZIP file, which exists only during the closure. The closure therefore copies it.
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
