#if MLXLM
    import Foundation
    import MLXLMCommon
    import MeSP

    extension FineTuner {
        /// Opens a bundle with the tokenizer of a container.
        ///
        /// - Parameters:
        ///   - bundle: the bundle's folder.
        ///   - container: a container with the model that the bundle was made from.
        ///   - folder: the folder for runs. nil: a folder with the bundle's name, in `MeSP` in the Application Support folder.
        /// - Throws: `FineTuningError` if `bundle` is not a bundle, is damaged, or has an unknown format.
        public convenience init(bundle: URL, container: ModelContainer, folder: URL? = nil) async throws {
            try await self.init(bundle: bundle, tokenizer: ContainerTokenizer(container.tokenizer), folder: folder)
        }

        /// Opens a container's model, as `init(model:tokenizer:bundle:folder:progress:)` does.
        ///
        /// - Parameters:
        ///   - model: the folder that the container was loaded from, with a model in MLX's quantized format.
        ///   - container: the container.
        ///   - bundle: the folder of the bundle. nil: a folder with the model's name, in `MeSP/Models` in the Application Support folder.
        ///   - folder: the folder for runs. nil: a folder with the bundle's name, in `MeSP` in the Application Support folder.
        ///   - progress: receives the written fraction of the weights, from 0 to 1, on any thread.
        /// - Throws: `FineTuningError` if no bundle can be made of the model; `CancellationError` if the task is cancelled.
        public convenience init(
            model: URL, container: ModelContainer, bundle: URL? = nil, folder: URL? = nil,
            progress: @escaping @Sendable (Double) -> Void = { _ in }
        ) async throws {
            try await self.init(
                model: model, tokenizer: ContainerTokenizer(container.tokenizer), bundle: bundle, folder: folder,
                progress: progress)
        }
    }
#endif
