import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

#if canImport(CryptoKit)
    import CryptoKit
#endif

extension ElementType {
    /// The codes of the element types that a model's files may have.
    fileprivate static let codes: KeyValuePairs<String, ElementType> = [
        "F32": .float32, "F16": .float16, "BF16": .bfloat16, "U32": .uint32, "U8": .uint8,
    ]
    fileprivate static let floats: [ElementType] = [.float32, .float16, .bfloat16]
    fileprivate var code: String { Self.codes.first { $0.value == self }?.key ?? rawValue }
}

struct SourceTensor: Equatable {
    let file: URL
    let offset: Int
    let type: ElementType
    let shape: [Int]

    var size: Int { shape.reduce(type.dtype.size, *) }

    /// Calls `body` with the first `count` bytes of the tensor, or with all, in pieces of at most 1 MiB.
    func read(_ count: Int = .max, _ body: (UnsafeRawBufferPointer) throws -> Void) throws {
        let opened = try openRegularFile(file, O_RDONLY, followsLinks: true)
        defer { close(opened) }
        let size = min(size, count)
        let piece = UnsafeMutableRawBufferPointer.allocate(byteCount: min(size, 1 << 20), alignment: 16)
        defer { piece.deallocate() }
        var (place, end) = (offset, offset + size)
        while place < end {
            let count = pread(opened, piece.baseAddress, min(piece.count, end - place), off_t(place))
            guard count > 0 else { throw MeSPError(count < 0 ? lastError() : "it became shorter") }
            // A piece ends at the end of a number.
            let whole = count - count % type.dtype.size
            guard whole > 0 else { throw MeSPError("it became shorter") }
            try body(UnsafeRawBufferPointer(rebasing: piece[..<whole]))
            place += whole
        }
    }
}

extension SourceTensor {
    fileprivate func sha256() throws -> String {
        var hash = SHA256()
        try read { hash.update(data: Data($0)) }
        return hexadecimal(hash.finalize())
    }
}

struct SourceTensors {
    private let folder: URL
    private(set) var tensors = [String: SourceTensor]()
    /// The weight files. The size and the modification time show whether a file has changed.
    private(set) var files = [(url: URL, size: Int, modified: Duration)]()
    /// The number of tensors of other parts of the model, such as a vision encoder.
    private(set) var leftOut = 0
    private(set) var isTied: Bool

    private static let (embedding, head) = ("model.embed_tokens.", "lm_head.")

    /// Reads the headers of a model's files.
    ///
    /// - Parameter known: MeSP's names of the model's tensors, including a separate head.
    init(_ folder: URL, _ config: ConfigJSON, isTied: Bool, known: Set<String>) throws {
        (self.folder, self.isTied) = (folder, isTied)
        for file in try Self.files(folder) {
            try add(ModelImport.place(of: file.lastPathComponent, in: folder), config, known)
        }
        try findHead()
        try checkTypes()
        let expected = self.isTied ? known.subtracting([Self.head + "weight"]) : known
        if let missing = expected.subtracting(tensors.keys).min() {
            throw MeSPError(
                "The weights in \(folder.path) lack \(missing), which its config.json asks for; take all files of the model, unchanged."
            )
        }
    }

    func tensor(_ name: String, _ shape: [Int]) throws -> SourceTensor {
        guard let tensor = tensors[name] else {
            throw MeSPError(
                "The weights in \(folder.path) lack \(name); take all files of the model, unchanged.")
        }
        guard tensor.shape == shape else {
            throw doNotFit("\(name) is \(Self.list(tensor.shape)), not \(Self.list(shape))")
        }
        return tensor
    }

    /// Returns a digest of the tensors' names, shapes and first 4,096 bytes.
    func sample() throws -> String {
        var hash = SHA256()
        for (name, tensor) in tensors.sorted(by: { $0.key < $1.key }) {
            hash.update(data: Data("\(name) \(tensor.shape)".utf8))
            try tensor.read(4096) { hash.update(data: Data($0)) }
        }
        return hexadecimal(hash.finalize())
    }

    /// Throws if a matrix is stored with biases that its quantization lacks.
    func checkBiases(of name: String, _ quantization: Quantization) throws {
        guard !quantization.hasBiases, tensors["\(name).biases"] != nil else { return }
        throw MeSPError(
            "\(name) has biases in the files, but config.json gives it the mode \(quantization.mode), which has none; take an unchanged config.json."
        )
    }

    /// The smallest type that holds all scales, biases and vectors exactly; bfloat16 without affine scales.
    var dtype: ElementType {
        guard tensors.keys.contains(where: { $0.hasSuffix(".scales") }) else { return .bfloat16 }
        let types = Set(tensors.values.map(\.type).filter(ElementType.floats.contains))
        return types.count == 1 ? types.first ?? .float32 : .float32
    }

    // MARK: - Files

    /// Returns the weight files: `model.safetensors` if it exists, or else the files in the index, as in transformers. If there is no index either,
    /// returns all files `model*.safetensors`.
    private static func files(_ folder: URL) throws -> [URL] {
        func url(_ name: String) -> URL { folder.appendingPathComponent(name) }
        func exists(_ name: String) -> Bool { FileManager.default.fileExists(atPath: url(name).path) }
        if exists("model.safetensors") { return [url("model.safetensors")] }
        let index = url("model.safetensors.index.json")
        guard exists(index.lastPathComponent) else {
            let names = ((try? FileManager.default.contentsOfDirectory(atPath: folder.path)) ?? []).filter {
                $0.hasPrefix("model") && $0.hasSuffix(".safetensors")
            }
            guard !names.isEmpty else { throw MeSPError("\(folder.path) holds no weights (model*.safetensors).") }
            return names.sorted().map(url)
        }
        let entries = try? readObject(index)["weight_map"]?.object?.values.map(\.string)
        let names = Set((entries ?? []).map { $0 ?? "" })
        guard !names.isEmpty, names.allSatisfy({ leadsDown($0) && !$0.contains("/") }) else {
            throw MeSPError("\(index.path) cannot be read; download the model again.")
        }
        for name in names.sorted() where !exists(name) {
            throw MeSPError("\(index.path) names \(name), which is not in the folder; add that file.")
        }
        return names.sorted().map(url)
    }

    private mutating func add(_ file: URL, _ config: ConfigJSON, _ known: Set<String>) throws {
        let damaged = MeSPError("The weights \(file.path) are truncated or damaged; download the model again.")
        let opened = try explaining {
            try openRegularFile(file, O_RDONLY, followsLinks: true)
        } as: {
            "The weights \(file.path) cannot be read (\($0)); download the model again."
        }
        let handle = FileHandle(fileDescriptor: opened, closeOnDealloc: true)
        guard let status = status(of: opened), let first = try? handle.read(upToCount: 8), first.count == 8 else {
            throw damaged
        }
        let length = first.withUnsafeBytes { UInt64(littleEndian: $0.loadUnaligned(as: UInt64.self)) }
        guard length <= Bounds.headerBytes - 8, Int(length) + 8 <= status.size,
            let text = try? handle.read(upToCount: Int(length)), text.count == Int(length),
            let header = try? JSONValue(json: text), let entries = header.object
        else { throw damaged }
        files.append((file, status.size, status.modified))
        for (key, entry) in entries.sorted(by: { $0.key < $1.key }) where key != "__metadata__" {
            let name = JSONValue.escaped(key)  // messages contain the name
            guard !PlainFamilies.buffers.contains(where: name.hasSuffix) else { continue }
            guard let here = TensorNames.here(name, config.family) else {
                leftOut += 1
                continue
            }
            try checkIsKnown(here, name, config, known)
            guard let code = entry.object?["dtype"]?.string else { throw damaged }
            guard let type = ElementType.codes.first(where: { $0.key == code })?.value else {
                throw MeSPError(
                    "\(name) in \(folder.path) is of type \(code), which is not supported; take a model of one of \(ElementType.codes.map(\.key).joined(separator: ", "))."
                )
            }
            guard
                let tensor = Self.tensor(
                    entry, type, file, start: 8 + Int(length), count: status.size - 8 - Int(length))
            else { throw damaged }
            guard tensors.updateValue(tensor, forKey: here) == nil else {
                throw MeSPError("The weights in \(folder.path) hold \(name) twice; take the files of one model.")
            }
        }
    }

    private static func tensor(
        _ entry: JSONValue, _ type: ElementType, _ file: URL, start: Int, count: Int
    ) -> SourceTensor? {
        func numbers(_ key: String) -> [Int]? {
            guard let values = entry.object?[key]?.array else { return nil }
            let numbers = values.compactMap { if case .integer(let number) = $0 { number } else { nil } }
            return numbers.count == values.count && numbers.allSatisfy { (0...count).contains($0) } ? numbers : nil
        }
        guard let shape = numbers("shape"), let ends = numbers("data_offsets"), ends.count == 2, ends[0] <= ends[1]
        else { return nil }
        var size = type.dtype.size
        for dimension in shape {
            let (product, overflows) = size.multipliedReportingOverflow(by: dimension)
            guard !overflows else { return nil }
            size = product
        }
        guard size == ends[1] - ends[0] else { return nil }
        return SourceTensor(file: file, offset: start + ends[0], type: type, shape: shape)
    }

    private func checkIsKnown(_ here: String, _ name: String, _ config: ConfigJSON, _ known: Set<String>) throws {
        let (stem, part) = Self.parts(here)
        let isPart = ["scales", "biases"].contains(part)
        guard known.contains(isPart ? "\(stem).weight" : here) else {
            if name.hasPrefix("language_model.") {
                throw MeSPError(
                    "The weights in \(folder.path) are part of a multimodal model; take a text-only one.")
            }
            throw MeSPError(
                "The weights in \(folder.path) have \(name), which a \(config.modelType) model with its config.json does not use; take a model without it."
            )
        }
    }

    /// Decides from the stored tensors whether the head is tied to the embedding. If config.json ties them, the files may still have a head. A head
    /// that equals the embedding, or that is stored in place of it, is tied. A different head is not.
    private mutating func findHead() throws {
        let heads = tensors.filter { $0.key.hasPrefix(Self.head) }
        guard isTied, !heads.isEmpty else { return }
        let tables = tensors.filter { $0.key.hasPrefix(Self.embedding) }
        for name in heads.keys { tensors[name] = nil }
        func part(_ name: String) -> String { Self.parts(name).part }
        if tables.isEmpty {
            for (name, tensor) in heads { tensors[Self.embedding + part(name)] = tensor }
        } else if try Set(heads.keys.map(part)) != Set(tables.keys.map(part))
            || heads.contains(where: { try !areEqual($0.value, tables[Self.embedding + part($0.key)]) })
        {
            tensors.merge(heads) { $1 }
            isTied = false
        }
    }

    private func areEqual(_ one: SourceTensor, _ other: SourceTensor?) throws -> Bool {
        guard let other, one.type == other.type, one.shape == other.shape else { return false }
        return try one.sha256() == other.sha256()
    }

    /// Throws unless packed weights are uint32, scales without biases are uint8, and other tensors are floating-point.
    private func checkTypes() throws {
        for (name, tensor) in tensors.sorted(by: { $0.key < $1.key }) {
            let (stem, part) = Self.parts(name)
            let allowed: [ElementType] =
                if part == "weight", tensors["\(stem).scales"] != nil {
                    [.uint32]
                } else if part == "scales", tensors["\(stem).biases"] == nil { [.uint8] } else { ElementType.floats }
            guard allowed.contains(tensor.type) else {
                let names = allowed.map(\.code).joined(separator: " or ")
                throw doNotFit("\(name) is of type \(tensor.type.code), not \(names)")
            }
        }
    }

    private func doNotFit(_ reason: Sentence) -> MeSPError {
        MeSPError("The weights in \(folder.path) do not fit its config.json: \(reason).")
    }

    private static func parts(_ name: String) -> (stem: String, part: String) {
        guard let dot = name.lastIndex(of: ".") else { return ("", name) }
        return (String(name[..<dot]), String(name[name.index(after: dot)...]))
    }

    private static func list(_ shape: [Int]) -> String { "[\(shape.map(String.init).joined(separator: ", "))]" }
}

func readObject(_ url: URL) throws -> [String: JSONValue] {
    guard var text = shortFile(url, longest: Bounds.jsonBytes, followsLinks: true) else {
        throw MeSPError("it is not a regular file of at most \(Bounds.jsonBytes >> 20) MiB")
    }
    if text.starts(with: [0xEF, 0xBB, 0xBF]) { text = text.dropFirst(3) }
    guard let object = try? JSONValue(json: text).object else { throw MeSPError("it is not a JSON object") }
    return object
}
