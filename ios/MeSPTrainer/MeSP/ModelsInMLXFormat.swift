import Foundation
import MeSPBundle
import MeSPFiles
import MeSPImport
import MeSPSentences

extension FineTuner {
    /// Opens a quantized model in MLX's format, for example from [mlx-community](https://huggingface.co/mlx-community).
    ///
    /// The first call converts the model into a bundle. ``bundleSize(of:)`` returns the size of the bundle's weights. The bundle is excluded from
    /// backups. The model's files stay unchanged. An interrupted call is continued by the next call. Later calls open the existing bundle.
    ///
    /// - Parameters:
    ///   - model: the folder, with `config.json`, `tokenizer.json`, and the weights in one or more files `model*.safetensors`.
    ///   - tokenizer: the model's tokenizer.
    ///   - bundle: the folder of the bundle. nil: a folder with the model's name, in `MeSP/Models` in the Application Support folder.
    ///   - folder: the folder for runs, as in ``init(bundle:tokenizer:folder:)``.
    ///   - progress: receives the written fraction of the weights, from 0 to 1, on any thread.
    /// - Throws: ``FineTuningError`` if the model is not supported, is not in MLX's quantized format or is damaged, or if the bundle cannot be
    ///   written, for example because the disk is full; `CancellationError` if the task is cancelled.
    public convenience init(
        model: URL, tokenizer: any TextTokenizer, bundle: URL? = nil, folder: URL? = nil,
        progress: @escaping @Sendable (Double) -> Void = { _ in }
    ) async throws {
        let bundle = bundle ?? Self.bundle(of: model)
        let work = Task.detached {
            try FineTuningError.describing {
                let model = try ModelImport(model: model)
                if model.hasWritten(bundle) { return }
                do { try makeFolder(bundle.deletingLastPathComponent()) } catch {
                    throw MeSPError(
                        "Cannot make the folder \(bundle.deletingLastPathComponent().path): \(error.plainSentence).")
                }
                try model.write(to: bundle) { bytes, _ in
                    try Task.checkCancellation()
                    progress(Double(bytes) / Double(model.size))
                }
            }
        }
        try await withTaskCancellationHandler {
            try await work.value
        } onCancel: {
            work.cancel()
        }
        try await self.init(bundle: bundle, tokenizer: tokenizer, folder: folder)
    }

    /// Returns the size, in bytes, of the weights in the bundle that ``init(model:tokenizer:bundle:folder:progress:)`` makes of a model.
    ///
    /// - Throws: ``FineTuningError`` if the model cannot be converted.
    public static func bundleSize(of model: URL) async throws -> Int {
        try await Task.detached { try FineTuningError.describing { try ModelImport(model: model).size } }.value
    }

    private static func bundle(of model: URL) -> URL {
        inSupport("Models/\(model.resolvingSymlinksInPath().lastPathComponent).mesp")
    }
}
