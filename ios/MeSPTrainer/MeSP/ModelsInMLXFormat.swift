import Foundation
import MeSPBundle
import MeSPControl
import MeSPFiles
import MeSPImport
import MeSPSentences

extension FineTuner {
    /// Opens a quantized model in MLX's format, for example from [mlx-community](https://huggingface.co/mlx-community).
    ///
    /// The first call converts the model into a bundle. ``bundleSize(of:)`` returns the size of the bundle's weights. The bundle is excluded from
    /// backups. The model's files stay unchanged. An interrupted call is continued by the next call. Later calls open the existing bundle. If the
    /// model's files are others, or this library is, the call replaces the bundle; weights that are the same are kept, and so are runs.
    ///
    /// - Parameters:
    ///   - model: the folder, with `config.json`, `tokenizer.json`, and the weights in one or more files `model*.safetensors`.
    ///   - tokenizer: the model's tokenizer.
    ///   - bundle: the folder of the bundle. nil: a folder with the model's name, in `MeSP/Models` in the Application Support folder.
    ///   - folder: the folder for runs, as in ``init(bundle:tokenizer:folder:)``.
    ///   - progress: receives the written fraction of the weights, from 0 to 1, on any thread.
    /// - Throws: ``FineTuningError`` if the device or the model is not supported, if the model is not in MLX's quantized format or is damaged, or if
    ///   the bundle cannot be written, for example because the disk is full; `CancellationError` if the task is cancelled.
    public convenience init(
        model: URL, tokenizer: any TextTokenizer, bundle: URL? = nil, folder: URL? = nil,
        progress: @escaping @Sendable (Double) -> Void = { _ in }
    ) async throws {
        try await self.init(
            model: model, tokenizer: tokenizer, bundle: bundle, folder: folder, controller: .ofProcess,
            progress: progress)
    }

    package convenience init(
        model: URL, tokenizer: any TextTokenizer, bundle: URL?, folder: URL?,
        controller: @autoclosure @escaping @MainActor @Sendable () -> RunController,
        progress: @escaping @Sendable (Double) -> Void = { _ in }
    ) async throws {
        if let refusal = MLXSupport.refusal { throw FineTuningError(refusal, .unsupportedDevice) }
        let bundle = bundle ?? .inSupport("Models/\(model.resolvingSymlinksInPath().lastPathComponent).mesp")
        let work = Task.detached {
            try FineTuningError.describing {
                try Self.importing.withLock { try Self.write(Self.modelImport(model), to: bundle, progress) }
            }
        }
        try await withTaskCancellationHandler {
            try await work.value
        } onCancel: {
            work.cancel()
        }
        try await self.init(bundle: bundle, tokenizer: tokenizer, folder: folder, controller: controller())
    }

    /// Returns the size, in bytes, of the weights in the bundle that ``init(model:tokenizer:bundle:folder:progress:)`` makes of a model.
    ///
    /// - Throws: ``FineTuningError`` if the model cannot be converted.
    public static func bundleSize(of model: URL) async throws -> Int {
        try await Task.detached { try modelImport(model).size }.value
    }

    private static func modelImport(_ model: URL) throws -> ModelImport {
        try FineTuningError.describing(else: .unsupportedModel) { try ModelImport(model: model) }
    }

    /// Held while a bundle is written, so that a second fine-tuner of the model opens the bundle of the first.
    private static let importing = NSLock()

    private static func write(_ model: ModelImport, to bundle: URL, _ progress: (Double) -> Void) throws {
        if model.hasWritten(bundle) { return }
        let folder = bundle.deletingLastPathComponent()
        // A run reads its blocks from the bundle.
        if isBusy, FileManager.default.fileExists(atPath: bundle.path) { throw MeSPError(busy, .busy) }
        try explaining({ try makeFolder(folder) }, as: { "Cannot make the folder \(folder.path): \($0)." })
        try model.write(to: bundle, replaces: true) { bytes, _ in
            try Task.checkCancellation()
            progress(Double(bytes) / Double(model.size))
        }
    }
}
