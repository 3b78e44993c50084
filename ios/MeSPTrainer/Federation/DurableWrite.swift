import Foundation
import MeSPFiles

/// Writes a file that only its owner can read. After a crash or a power failure, the file is either completely written or unchanged.
///
/// - Parameter replacing: whether to replace an existing file. If false, an existing file stays unchanged.
func writeDurably(_ data: Data, to file: URL, replacing: Bool = true) throws {
    func check(_ result: Int32) throws {
        if result < 0 { throw POSIXError(POSIXErrorCode(rawValue: errno) ?? .EIO) }
    }
    let folder = file.deletingLastPathComponent()
    let new = folder.appendingPathComponent(".\(file.lastPathComponent).\(UUID().uuidString)").path
    let descriptor = open(new, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0o600)
    try check(descriptor)
    defer { unlink(new) }
    do {
        let handle = FileHandle(fileDescriptor: descriptor, closeOnDealloc: true)
        #if os(iOS)
            try FileManager.default.setAttributes(
                [.protectionKey: FileProtectionType.completeUntilFirstUserAuthentication], ofItemAtPath: new)
        #endif
        try handle.write(contentsOf: data)
        try check(synchronize(descriptor))
        try handle.close()
    }
    if replacing {
        try check(rename(new, file.path))
    } else if link(new, file.path) < 0, errno != EEXIST {
        try check(-1)
    }
    try check(synchronize(folder: folder))
}
