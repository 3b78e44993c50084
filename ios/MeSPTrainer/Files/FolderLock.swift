import Foundation
import MeSPSentences

/// A lock on a folder through the file `.lock` in it. It lets one process at a time write into the folder. The system releases the lock when the
/// process ends.
package final class FolderLock: Sendable {
    private let file: Int32

    /// Takes the lock. Creates the folder if necessary.
    ///
    /// - Throws: `MeSPError` if the folder is locked, is a symbolic link or cannot be created, or the file `.lock` cannot be opened.
    package init(_ folder: URL) throws {
        do { try makeFolder(folder) } catch {
            throw MeSPError("Cannot make the folder \(folder.path): \(error.plainSentence).")
        }
        let url = folder.appendingPathComponent(".lock")
        file = try writing(url) { try openRegularFile(url, O_RDWR | O_CREAT) }
        var status = stat()
        // Writing to a file that has another name too would change a file elsewhere.
        guard fstat(file, &status) == 0, status.st_nlink <= 1 else {
            close(file)
            throw MeSPError("\(url.path) is another file's name too; remove it.")
        }
        guard flock(file, LOCK_EX | LOCK_NB) == 0 else {
            let holder = (try? String(contentsOf: url, encoding: .utf8)) ?? ""
            close(file)
            let who: Sentence = holder.isEmpty ? "Another process" : Sentence(english: holder)
            throw MeSPError(
                "\(who) is writing to \(folder.path); wait for it, stop it, or choose another folder."
            )
        }
        #if os(iOS)
            // On iOS only this app locks the folder, so the holder is another run of this app.
            let holder = ("Another run of this app" as Sentence).english
        #else
            // `ProcessInfo.hostName` uses the network and could make the system ask for permission.
            var name = [CChar](repeating: 0, count: 256)
            gethostname(&name, name.count - 1)
            let host = String(decoding: name.prefix { $0 != 0 }.map(UInt8.init(bitPattern:)), as: UTF8.self)
            let holder = "Process \(getpid()) on \(host)"
        #endif
        // The holder's name is informative only, so failures are ignored.
        _ = ftruncate(file, 0)
        _ = pwrite(file, holder, holder.utf8.count, 0)
    }

    deinit { close(file) }
}
