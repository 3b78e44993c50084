import Foundation
import MeSPBundle
import MeSPFiles
import MeSPImport
import MeSPSentences

extension FineTuner {
    /// Opens a model in MLX's 4-bit format, as [mlx-community](https://huggingface.co/mlx-community) has it and mlx-swift-lm loads it.
    ///
    /// The first time, its weights are rewritten into a bundle, a second copy of them of ``bundleSize(of:)`` bytes, in pieces of at most a megabyte.
    /// The model's files are only read. Where this is interrupted, the next call continues it. The bundle is left out of backups. A call for a
    /// model whose bundle is there opens that.
    ///
    /// - Parameters:
    ///   - model: the folder, with `config.json`, `model.safetensors` and `tokenizer.json`.
    ///   - tokenizer: the model's tokenizer.
    ///   - bundle: the folder of the bundle. nil: one with the model's name in `MeSP/Models` in the folder for application support.
    ///   - folder: the folder of the run, as of ``init(bundle:tokenizer:folder:)``.
    ///   - progress: called with the share of the bundle that is written, from 0 to 1, on any thread.
    /// - Throws: ``FineTuningError`` where the model is of no family that is taken here, is not quantized as MLX does, is damaged, or the disk has
    ///   no room; `CancellationError` where the task was cancelled.
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

    /// Returns the size in bytes of the bundle that ``init(model:tokenizer:bundle:folder:progress:)`` makes of a model. It takes that beside the
    /// model's own files.
    ///
    /// - Throws: ``FineTuningError`` where no bundle can be made of it.
    public static func bundleSize(of model: URL) async throws -> Int {
        try await Task.detached { try FineTuningError.describing { try ModelImport(model: model).size } }.value
    }

    private static func bundle(of model: URL) -> URL {
        inSupport("Models/\(model.resolvingSymlinksInPath().lastPathComponent).mesp")
    }
}
