import Foundation
import MLX
import MeSPAdapters
import MeSPBundle

/// A bundle's model, with or without adapters, for generation and scoring.
///
/// Weights stay mapped from one token to the next if they fit in memory. Otherwise each block's weights are mapped only while the block runs.
package struct CachedModel {
    package let bundle: ModelBundle
    /// The maximum number of a text's tokens that go through the blocks together.
    let chunk: Int
    /// The rows that tokens below 0 stand for: row r for the token -1 - r. Texts with different images so have different tokens.
    var images: ImageRows?
    private var adapters: LoadedAdapters?
    private(set) var selection: AdapterSelection?
    private var kept: Kept
    private let isRecurrent: Bool
    private static let tileBytes = 1 << 20
    static let mostTexts = 16

    private final class Kept: MapHolder {
        /// The bit lengths of the token counts for which a GPU has compiled the kernels.
        var compiled: Set<Int>
        private var views = [Int: PackedWeights.Views]()
        private var layers = [Int: [Projection: LoRALinear]]()

        func views(_ index: Int) -> PackedWeights.Views {
            let known = views[index] ?? PackedWeights.Views()
            views[index] = known
            return known
        }

        func layers(_ index: Int, _ block: Block) -> [Projection: LoRALinear] {
            if let known = layers[index] { return known }
            var made = [Projection: LoRALinear]()
            for projection in block.weights.shape.modules.flatMap(\.projections) {
                made[projection] = block.layer(projection)
            }
            layers[index] = made
            return made
        }

        init(compiled: Set<Int>) { self.compiled = compiled }

        func withoutLayers() -> Kept {
            let other = Kept(compiled: compiled)
            other.views = views
            return other
        }

        /// A block's output that may not be evaluated yet. Its evaluation reads mapped weights.
        var pending: MLXArray?

        func releaseArrays() {
            pending?.eval()
            forget()
        }

        func forget() { (pending, views, layers) = (nil, [:], [:]) }
    }

    package init(_ bundle: ModelBundle, adapters: [WeightedAdapters] = [], chunk: Int = 256) throws {
        self.init(bundle, with: nil, chunk: chunk)
        try use(adapters)
    }

    init(_ bundle: ModelBundle, with adapters: LoadedAdapters?, chunk: Int = 256) {
        (self.bundle, self.adapters, self.chunk) = (bundle, adapters, chunk)
        kept = Kept(compiled: bundle.processor.numbersWithKernels(0...Int.bitWidth))
        isRecurrent = bundle.architecture.isRecurrent
        bundle.maps.areKept = bundle.manifest.mappedBytes <= bundle.processor.roomForMaps
        bundle.maps.add(kept)
    }

    /// Replaces the adapters. If loading fails, the model keeps its current adapters.
    mutating func use(_ adapters: [WeightedAdapters]) throws {
        let selection = AdapterSelection(adapters)
        self.adapters = try bundle.withDevice {
            try MLXErrors.repeating {
                try loadAdapters(adapters, architecture: bundle.architecture, dora: bundle.readScaled)
            }
        }
        self.selection = selection
        kept = kept.withoutLayers()
        bundle.maps.add(kept)
    }

    /// Calls `body` with the last block's output for `tokens`.
    ///
    /// - Parameter body: called with up to `chunk` tokens at a time: their range in `tokens`, and y `[n, hidden]`, evaluated.
    package func forward(
        _ tokens: ArraySlice<Int>, _ cache: inout PromptCache, _ atBlock: () throws -> Void,
        _ body: (Range<Int>, MLXArray) throws -> Void
    ) throws {
        if cache.blocks.isEmpty {
            cache.blocks = Array(repeating: nil, count: bundle.architecture.numHiddenLayers)
        }
        for range in cache.pieces(of: tokens.count, size: chunk, isRecurrent: isRecurrent) {
            let read = tokens.dropFirst(range.lowerBound).prefix(range.count)
            var x = try embedded(read)
            let embeddings = try layerEmbeddings(read, x)
            try pass(rows: range.count, atBlock) { block, pause in
                var states = [cache.blocks[block]]
                x = try forward(
                    block, x, sequences: [0..<range.count], &states, keepsStates: true, embeddings,
                    shared: shared(block, [cache]), pause: pause)
                cache.blocks[block] = states[0]
                if range.count > 1 { Memory.clearCache() }
            }
            cache.add(read)
            Memory.clearCache()
            try body(range, x)
        }
    }

    /// Returns the last block's output for one token of each of several texts, and adds each token to the cache of its text.
    ///
    /// - Returns: y `[n, hidden]`, which may not be evaluated yet.
    func forward(
        next tokens: [Int], _ caches: inout [PromptCache], _ atBlock: () throws -> Void
    ) throws -> MLXArray {
        var x = try embedded(tokens[...])
        let embeddings = try layerEmbeddings(tokens[...], x)
        try pass(rows: tokens.count, atBlock) { block, pause in
            var states = [MixerState?]()
            for text in caches.indices {
                states.append(caches[text].blocks[block])
                caches[text].blocks[block] = nil  // keys and values that nothing else refers to are written in place
            }
            defer { for text in caches.indices { caches[text].blocks[block] = states[text] } }
            x = try forward(
                block, x, sequences: tokens.indices.map { $0..<$0 + 1 }, &states, keepsStates: true, embeddings,
                shared: shared(block, caches), pause: pause, isDeferred: bundle.maps.areKept,
                uncut: bundle.processor.uncutRows)
        }
        for (text, token) in tokens.enumerated() { caches[text].add([token]) }
        return x
    }

    var adapterBytes: Int { adapters?.bytes ?? 0 }

    /// Frees the views and layers of the weights.
    func forget() { kept.forget() }

    func withDevice<R>(_ body: () throws -> R) throws -> R {
        do {
            return try bundle.withDevice(body)
        } catch {
            forget()
            throw error
        }
    }

    /// Returns the size of a cache after `tokens` tokens, in bytes.
    ///
    /// - Parameter cache: a cache of another text, from which the size of recurrent states is taken; nil to leave out recurrent states.
    func cacheSize(tokens: Int, like cache: PromptCache?) -> Int {
        bundle.architecture.cacheSize(tokens: tokens, itemSize: bundle.dtype.size) + (cache?.recurrentSize ?? 0)
    }

    /// Returns the last block's output for several sequences, each of which continues the text in `cache`. The cache does not change.
    ///
    /// - Returns: y `[n, hidden]` of all sequences, concatenated and evaluated.
    func forward(branches sequences: [[Int]], after cache: PromptCache, _ atBlock: () throws -> Void) throws
        -> MLXArray
    {
        var rows = [Range<Int>]()
        for sequence in sequences {
            let start = rows.last?.upperBound ?? 0
            rows.append(start..<start + sequence.count)
        }
        let tokens = sequences.flatMap { $0 }
        var x = try embedded(tokens[...])
        let embeddings = try layerEmbeddings(tokens[...], x)
        let owners = bundle.architecture.owners
        var kept = [Int: [MixerState.KeyValues]]()
        try pass(rows: tokens.count, atBlock) { block, pause in
            var states = [MixerState?](repeating: cache.blocks[block], count: rows.count)
            let shared = bundle.architecture.keysOf(block).flatMap { kept[$0] } ?? []
            x = try forward(
                block, x, sequences: rows, &states, keepsStates: owners.contains(block), embeddings, shared: shared,
                pause: pause)
            if owners.contains(block) { kept[block] = states.compactMap { $0?.keysAndValues } }
        }
        Memory.clearCache()
        return x
    }

    /// - Parameter uncut: the maximum number of rows for which arrays are not split into tiles.
    func schedule(
        rows: Int, length: Int, uncut: Int = QuantizedMatrix.fewRows, pause: (() -> Void)? = nil
    ) -> Schedule {
        bundle.schedule(length: length, bytes: rows <= uncut ? Schedule.uncut : Self.tileBytes, pause: pause)
    }

    private func pass(
        rows: Int, _ atBlock: () throws -> Void, _ body: (_ block: Int, _ pause: (() -> Void)?) throws -> Void
    ) throws {
        let length = Int.bitWidth - rows.leadingZeroBitCount
        let isWarm = kept.compiled.contains(length)
        var failure: (any Error)?
        try withoutActuallyEscaping(atBlock) { atBlock in
            let pause = {
                guard failure == nil else { return }
                do { try atBlock() } catch {
                    failure = error
                    MLXErrors.interrupt(error)
                }
            }
            for block in 0..<bundle.architecture.numHiddenLayers {
                try atBlock()
                try body(block, isWarm ? nil : pause)
                if let failure { throw failure }
            }
        }
        kept.compiled.insert(length)
    }

    /// The tokens that a text may have; those below 0 stand for rows of `images`.
    var tokens: Range<Int> { -(images?.count ?? 0)..<bundle.architecture.vocabSize }

    private func embedded(_ tokens: ArraySlice<Int>) throws -> MLXArray {
        let rows = tokens.enumerated().filter { $0.element < 0 }
        let slice = images.flatMap { images in
            rows.isEmpty
                ? nil : ImageRows.Slice(positions: rows.map(\.offset), rows: rows.map { -1 - $0.element }, of: images)
        }
        return try bundle.embed(tokens.map { Int32(max($0, 0)) }, images: slice)[0]
    }

    private func layerEmbeddings(_ tokens: ArraySlice<Int>, _ x0: MLXArray) throws -> LayerEmbeddings? {
        try bundle.layerEmbeddings(tokens.map { Int32($0) }, x0: x0)
    }

    private func shared(_ block: Int, _ caches: [PromptCache]) -> [MixerState.KeyValues] {
        guard let owner = bundle.architecture.keysOf(block) else { return [] }
        return caches.compactMap { $0.blocks[owner]?.keysAndValues }
    }

    /// - Parameters:
    ///   - keepsStates: whether to replace the elements of `states` by the states after the tokens. Otherwise they are nil afterwards.
    ///   - isDeferred: whether nothing needs y yet. Without a `pause`, a CPU then begins to compute y, and a GPU computes y together with the next
    ///     token.
    private func forward(
        _ index: Int, _ x: MLXArray, sequences: [Range<Int>], _ states: inout [MixerState?], keepsStates: Bool,
        _ embeddings: LayerEmbeddings?, shared: [MixerState.KeyValues], pause: (() -> Void)?, isDeferred: Bool = false,
        uncut: Int = QuantizedMatrix.fewRows
    ) throws -> MLXArray {
        let perLayer = try bundle.part(of: embeddings, layer: index)
        return try bundle.withBlock(index) { weights in
            var weights = weights
            if bundle.maps.areKept { weights.packed.views = kept.views(index) }
            var known = states.map { $0 ?? MixerState(weights, dtype: bundle.dtype) }
            states = states.map { _ in nil }
            defer { if keepsStates { states = known } }
            var block = Block(
                weights: weights, lora: adapters?.lora[index] ?? MLXArray.zeros([0]),
                layout: adapters?.layouts[index] ?? LoRALayout(block: weights.shape, rank: 0, modules: []),
                scale: adapters?.scale ?? 0,
                schedule: schedule(
                    rows: x.dim(0), length: (known.map(\.count).max() ?? 0) + x.dim(0), uncut: uncut, pause: pause))
            (block.perLayerEmbeddings, block.sharedStates) = (perLayer, shared)
            if bundle.maps.areKept { block.keptLayers = bundle.processor.kept { kept.layers(index, block) } }
            let y = block.output(x, sequences: sequences, &known)
            // Evaluating y also evaluates attention's keys and values, but not the recurrent states.
            let states = keepsStates ? known.filter(\.isRecurrent).flatMap(\.arrays) : []
            if isDeferred, pause == nil {
                if !block.schedule.processor.chainsParts { asyncEval([y] + states) }
                kept.pending = y
            } else {
                eval([y] + states)
                pause?()
            }
            return y
        }
    }
}

extension Architecture {
    func cacheSize(tokens: Int, itemSize: Int) -> Int {
        layers.indices.reduce(0) { sum, index in
            guard case .attention(let mixer) = block(index).mixer, mixer.keysOf == nil else { return sum }
            let places = tokens + MixerState.KeyValues.room - 1
            return sum + 2 * mixer.numKeyValueHeads * mixer.headDim * itemSize * places
        }
    }
}
