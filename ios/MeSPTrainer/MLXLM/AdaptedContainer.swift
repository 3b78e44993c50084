#if MLXLM
    import Foundation
    import MLX
    import MLXLMCommon
    import MeSP

    /// A container whose adapters can be exchanged.
    ///
    /// Loading uses the GPU, so an app loads adapters while it is in front.
    public final class AdaptedContainer: Sendable {
        /// The container.
        public let container: ModelContainer
        private let loaded = Loaded()

        /// Creates it with a container that has no adapters.
        public init(_ container: ModelContainer) { self.container = container }

        /// Loads adapters in place of those that are loaded.
        ///
        /// - Parameters:
        ///   - folder: the folder of the adapters; nil loads none.
        ///   - strength: the factor of their effect.
        /// - Throws: an error if the folder cannot be read or its adapters do not fit the model, which then has none; `FineTuningError` if `strength`
        ///   is not 1 for DoRA adapters.
        public func load(_ folder: URL?, strength: Float = 1) async throws {
            try await container.perform { [loaded] context in
                if let old = loaded.adapters { context.model.unload(adapter: old) }
                loaded.adapters = nil
                guard let folder else { return }
                let adapters = try LoRAContainer.from(directory: folder)
                    .fitted(to: context.model, strength: strength)
                do {
                    try context.model.load(adapter: adapters)
                } catch {
                    context.model.unload(adapter: adapters)
                    throw error
                }
                loaded.adapters = adapters
            }
        }

        /// Switches the loaded adapters off and on.
        ///
        /// - Parameter areOn: whether the model uses the adapters.
        public func setAdapters(areOn: Bool) async {
            await container.perform { $0.model.setLoRAEnabled(areOn) }
        }
    }

    /// The adapters in a container. Only code in the container's `perform` uses them.
    private final class Loaded: @unchecked Sendable {
        var adapters: LoRAContainer?
    }

    extension LoRAContainer {
        /// Returns the adapters of this package with the model's names of layers, in the model's dtype.
        ///
        /// - Parameters:
        ///   - model: the model that they are loaded into.
        ///   - strength: the factor of their effect.
        /// - Throws: `FineTuningError` if `strength` is not 1 for DoRA adapters.
        public func fitted(to model: any LanguageModel, strength: Float = 1) throws -> LoRAContainer {
            guard strength == 1 || configuration.fineTuneType == .lora else {
                throw FineTuningError("DoRA adapters have no strength but 1.")
            }
            let modules = Set(model.namedModules().map(\.0))
            let dtype = model.parameters().flattened()
                .first { $0.0.hasSuffix(".scales") && $0.1.dtype.isFloatingPoint }?.1.dtype
            let matrices = parameters.flattened().map { name, matrix -> (String, MLXArray) in
                let module = name.split(separator: ".").dropLast().joined(separator: ".")
                let short = name.replacing("language_model.", with: "", maxReplacements: 1)
                return (modules.contains(module) ? name : short, dtype.map { matrix.asType($0) } ?? matrix)
            }
            let lora = configuration.loraParameters
            return LoRAContainer(
                configuration: LoRAConfiguration(
                    numLayers: configuration.numLayers, fineTuneType: configuration.fineTuneType,
                    loraParameters: .init(rank: lora.rank, scale: lora.scale * strength, keys: lora.keys)),
                parameters: .unflattened(matrices))
        }
    }
#endif
