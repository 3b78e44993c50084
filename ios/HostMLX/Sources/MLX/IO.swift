import CHostMLX
import Foundation

public enum LoadSaveError: Error {
    case unableToOpen(URL, String)
    case unknownExtension(String)
}

extension LoadSaveError: LocalizedError {
    public var errorDescription: String? {
        switch self {
        case .unableToOpen(let url, let message): "\(message) \(url)"
        case .unknownExtension(let fileExtension): "Unknown extension \(fileExtension)"
        }
    }
}

private func path(_ url: URL, _ fileExtension: String) throws -> String {
    precondition(url.isFileURL)
    guard url.pathExtension == fileExtension else { throw LoadSaveError.unknownExtension(url.pathExtension) }
    return url.path(percentEncoded: false)
}

public func save(
    arrays: [String: MLXArray], metadata: [String: String] = [:], url: URL, stream: StreamOrDevice = .default
) throws {
    let path = try path(url, "safetensors")
    // As in mlx-swift, a failed array is reported to the error handler and left out.
    let arrays = arrays.filter { succeeded($0.value) }
    _ = try withError {
        withVector(Array(arrays.values)) { values in
            withCStrings(Array(arrays.keys)) { names in
                withCStrings(Array(metadata.keys)) { keys in
                    withCStrings(Array(metadata.values)) { texts in
                        evalLock.withLock {
                            host_save_safetensors(path, names, arrays.count, values, keys, texts, metadata.count)
                        }
                    }
                }
            }
        }
    }
}

public func loadArrays(url: URL, stream: StreamOrDevice = .cpu) throws -> [String: MLXArray] {
    try loadArraysAndMetadata(url: url, stream: stream).0
}

public func loadArraysAndMetadata(
    url: URL, stream: StreamOrDevice = .cpu
) throws -> ([String: MLXArray], [String: String]) {
    typealias Contents = (arrays: [String: MLXArray], metadata: [String: String])

    let path = try path(url, "safetensors")
    var contents: Contents = ([:], [:])
    _ = try withError {
        withUnsafeMutablePointer(to: &contents) { contents in
            host_load_safetensors(path, stream.ctx, contents) { context, name, array in
                guard let name else { return }
                context?.assumingMemoryBound(to: Contents.self).pointee.arrays[String(cString: name)] = MLXArray(array)
            } _: { context, key, value in
                guard let key, let value else { return }
                context?.assumingMemoryBound(to: Contents.self).pointee.metadata[String(cString: key)] =
                    String(cString: value)
            }
        }
    }
    return contents
}
