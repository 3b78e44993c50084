#if Tokenizers
    import Foundation
    import MeSP

    extension FineTuner {
        /// Opens a bundle with the tokenizer in its folder.
        ///
        /// - Parameters:
        ///   - bundle: the bundle's folder.
        ///   - folder: the folder for runs. nil: a folder with the bundle's name, in `MeSP` in the Application Support folder.
        /// - Throws: `FineTuningError` if `bundle` is not a bundle, is damaged, has an unknown format, or has a tokenizer that cannot be read.
        public convenience init(bundle: URL, folder: URL? = nil) async throws {
            try await self.init(bundle: bundle, tokenizer: loadTokenizer(bundle: bundle), folder: folder)
        }

        /// Opens a model in MLX's quantized format with the tokenizer in its folder, as `init(model:tokenizer:bundle:folder:progress:)` does.
        ///
        /// - Parameters:
        ///   - model: the folder, with `config.json`, the tokenizer's files, and the weights in one or more files `model*.safetensors`.
        ///   - bundle: the folder of the bundle. nil: a folder with the model's name, in `MeSP/Models` in the Application Support folder.
        ///   - folder: the folder for runs. nil: a folder with the bundle's name, in `MeSP` in the Application Support folder.
        ///   - progress: receives the written fraction of the weights, from 0 to 1, on any thread.
        /// - Throws: `FineTuningError` if the tokenizer cannot be read, or if no bundle can be made of the model; `CancellationError` if the task is
        ///   cancelled.
        public convenience init(
            model: URL, bundle: URL? = nil, folder: URL? = nil,
            progress: @escaping @Sendable (Double) -> Void = { _ in }
        ) async throws {
            try await self.init(
                model: model, tokenizer: loadTokenizer(bundle: model), bundle: bundle, folder: folder,
                progress: progress)
        }
    }
#endif
