package struct BlockShape: Sendable, Equatable {
    package let architecture: Architecture
    package let mixer: Mixer
    package let mlp: MLP

    /// The block's linear layers, in the order of flat LoRA vectors.
    package var modules: [Module] {
        mixer.modules + mlp.modules + (architecture.perLayer?.modules ?? [])
    }

    package var trainable: [Module] { modules + (mlp.experts?.modules ?? []) }

    /// Returns the leading dimensions of a module's matrix: `[experts]` for experts' matrices, or none.
    package func stack(_ module: Module) -> [Int] { module.isStacked ? [mlp.experts?.numExperts ?? 0] : [] }

    package func dimensions(_ projection: Projection) -> (inputs: Int, outputs: Int) {
        let hidden = architecture.hiddenSize
        let dimensions = known(projection) ?? mlp.experts?.dimensions(projection, hidden: hidden)
        guard let dimensions else { preconditionFailure("no projection \(projection)") }
        return dimensions
    }

    private func known(_ projection: Projection) -> (inputs: Int, outputs: Int)? {
        let hidden = architecture.hiddenSize
        return mixer.dimensions(projection, hidden: hidden) ?? mlp.dimensions(projection, hidden: hidden)
            ?? architecture.perLayer?.dimensions(projection, hidden: hidden)
    }

    /// The MLP's gate, or the mixer's first projection if there is no MLP besides experts.
    package var wideProjection: Projection { mlp.modules.isEmpty ? mixer.modules[0].projections[0] : .gate }

    package func dimensions(_ module: Module) -> (inputs: Int, outputs: Int) { dimensions([module]) }

    package func dimensions(_ modules: [Module]) -> (inputs: Int, outputs: Int) {
        let parts = modules.flatMap(\.projections).map(dimensions)
        return (parts.first?.inputs ?? 0, parts.reduce(0) { $0 + $1.outputs })
    }

    package func place(_ projection: Projection) -> (module: Module, outputs: Range<Int>) {
        for module in trainable {
            guard let index = module.projections.firstIndex(of: projection) else { continue }
            let start = module.projections[..<index].reduce(0) { $0 + dimensions($1).outputs }
            return (module, start..<start + dimensions(projection).outputs)
        }
        preconditionFailure("no module for \(projection)")
    }

    package var plainArrays: [Weight] {
        let (hidden, postNorms) = (architecture.hiddenSize, architecture.postNorms)
        let norms =
            ["input_layernorm", "post_attention_layernorm"]
            + (postNorms ? ["pre_feedforward_layernorm", "post_feedforward_layernorm"] : [])
            + (architecture.perLayer == nil ? [] : ["post_per_layer_input_norm"])
        let choosing = mlp.experts.flatMap { experts in
            experts.bias.map { Weight(name: $0, shape: [experts.numExperts], isFloat32: true) }
        }
        let scalars = architecture.perLayer == nil ? [] : [Weight(name: "layer_scalar", shape: [1])]
        let biased = modules.filter { architecture.biases.contains($0.name) }
        return norms.map { Weight(name: $0 + ".weight", shape: [hidden]) } + mixer.arrays(hidden: hidden)
            + [choosing].compactMap { $0 } + scalars
            + biased.map { Weight(name: $0.name + ".bias", shape: [dimensions($0).outputs]) }
    }

    package var matrices: [Weight] {
        func ofModules(_ modules: [Module]) -> [Weight] {
            modules.map { module in
                let (inputs, outputs) = dimensions(module)
                return Weight(name: module.name, shape: stack(module) + [outputs, inputs])
            }
        }
        guard let experts = mlp.experts else { return ofModules(modules) }
        let hidden = architecture.hiddenSize
        let mlpGate = experts.mlpGate.map { [Weight(name: $0, shape: [1, hidden])] } ?? []
        let router = Weight(name: experts.router, shape: [experts.numExperts, hidden])
        return ofModules(modules) + mlpGate + [router] + ofModules(experts.modules)
    }

    var isWhole: Bool {
        let parts = modules.flatMap(\.projections)
        let all = Projection.allCases.filter { known($0) != nil }
        return parts.count == all.count && Set(parts) == Set(all)
            && modules.allSatisfy { Set($0.projections.map { dimensions($0).inputs }).count == 1 }
            && Set(modules.map(\.name)).count == modules.count
            && zip(architecture.hfModules ?? [], joined).allSatisfy { layer, parts in
                parts.isEmpty
                    || (parts.count == layer.parts.count && Set(parts.map { dimensions($0).inputs }).count == 1)
            }
            && joined.joined().count == Set(joined.joined().map(\.name)).count
    }

    private var joined: [[Module]] {
        (architecture.hfModules ?? []).map { layer in trainable.filter { layer.parts.contains($0.name) } }
    }
}

/// A frozen tensor of a model. For example, the shape is `[out, in]` for a matrix and `[experts, out, in]` for stacked matrices.
package struct Weight {
    package let name: String
    package let shape: [Int]
    package let isFloat32: Bool

    package init(name: String, shape: [Int], isFloat32: Bool = false) {
        (self.name, self.shape, self.isFloat32) = (name, shape, isFloat32)
    }
}
