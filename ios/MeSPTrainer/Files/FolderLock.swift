import Foundation
import MeSPSentences

/// The right to write into a folder, which one process has at a time: a lock on the file `.lock` in it. The system takes the lock
/// back when its process ends, in whatever way; the file stays.
package final class FolderLock: Sendable {
    private let file: Int32

    /// Takes the lock, and makes the folder if it isn't there.
    ///
    /// - Throws: `MeSPError` that says who has the lock.
    package init(_ folder: URL) throws {
        do {
            try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        } catch {
            throw MeSPError("Cannot make the folder \(folder.path): \(error.plainSentence).")
        }
        let url = folder.appendingPathComponent(".lock")
        file = try writing(url) { try openRegularFile(url, O_RDWR | O_CREAT) }
        guard flock(file, LOCK_EX | LOCK_NB) == 0 else {
            let holder = (try? String(contentsOf: url, encoding: .utf8)) ?? ""
            close(file)
            let who: Sentence = holder.isEmpty ? "Another process" : Sentence(english: holder)
            throw MeSPError(
                "\(who) is writing to \(folder.path); wait for it, stop it, or choose another folder."
            )
        }
        #if os(iOS)
            // Nobody but the app writes here.
            let holder = ("Another run of this app" as Sentence).english
        #else
            // `ProcessInfo.hostName` asks the network, and with it the person whether the app may use the local one.
            var name = [CChar](repeating: 0, count: 256)
            gethostname(&name, name.count - 1)
            let host = String(decoding: name.prefix { $0 != 0 }.map(UInt8.init(bitPattern:)), as: UTF8.self)
            let holder = "Process \(getpid()) on \(host)"
        #endif
        // It only informs.
        _ = ftruncate(file, 0)
        _ = pwrite(file, holder, holder.utf8.count, 0)
    }

    deinit { close(file) }
}
