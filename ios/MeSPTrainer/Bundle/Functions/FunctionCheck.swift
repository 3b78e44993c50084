import Foundation
import MeSPSentences

/// Returns whether this MLX version uses the layout of a bundle's function files. Other versions can crash on such a file.
func hasFunctionLayout(mlx version: String) -> Bool {
    let numbers = version.split(separator: ".", omittingEmptySubsequences: false).map { Int($0) }
    guard numbers.count == 3, numbers[0] == 0, numbers[1] == 32, let patch = numbers[2] else { return false }
    return patch >= 2
}

/// Throws unless the functions in a file contain only primitives that `AllowedPrimitives` permits, with valid shapes and indices.
///
/// MLX trusts the file's output shapes and `Gather` indices, so an invalid file could access memory outside the arrays.
///
/// - Parameter onGPU: whether the primitives must be on the GPU. Otherwise they must be on the CPU.
/// - Returns: the inputs and outputs of each function.
/// - Throws: `MeSPError` whose message is only the reason.
func checkFunctions(_ file: Data, onGPU: Bool) throws -> [FunctionSignature] {
    let allowed = try AllowedPrimitives.list.get()
    guard file.count <= AllowedPrimitives.largestFile else { throw damaged }
    var reader = FunctionReader(file: file, allowed: allowed)
    return try reader.functions().map { function in
        var check = FunctionCheck(allowed: allowed, device: onGPU ? 1 : 0)
        return try check.check(function)
    }
}

private let damaged = MeSPError("it is damaged")

private struct Constant {
    let type: ArrayType
    /// The largest integer in the constant, or nil if it contains a negative integer or no integers.
    let greatest: UInt64?
}

private struct Primitive {
    let name: String
    let allowed: AllowedPrimitives.Primitive
    let device: Int32
    let integers: [Int]
    let numbers: [Double]
    let lists: [[Int]]
    let inputs: [UInt64]
    let outputs: [(id: UInt64, type: ArrayType)]
}

private struct Function {
    let hasKeywords: Bool
    let inputs: [(id: UInt64, type: ArrayType)]
    let outputs: [UInt64]
    var constants = [UInt64: Constant]()
    var primitives = [Primitive]()
}

// MARK: - Reading

private struct FunctionReader {
    let file: Data
    let allowed: AllowedPrimitives
    var position = 0
    /// The constants of all functions in the file. MLX writes each constant only once.
    var constants = [UInt64: Constant]()

    mutating func functions() throws -> [Function] {
        guard try hasFunctionLayout(mlx: text()) else {
            throw MeSPError("it is not in the layout of MLX \(AllowedPrimitives.firstMLX)")
        }
        let count = try integer(Int32.self)
        guard try !bool(), try text().isEmpty else { throw damaged }
        var functions = [Function]()
        for _ in 0..<max(0, count) { functions.append(try function()) }
        guard position == file.count else { throw damaged }
        return functions
    }

    private mutating func function() throws -> Function {
        let keywords = try list(itemBytes: 8) { try $0.text() }
        let ids = try self.ids()
        let types = try list(itemBytes: 13) { try $0.array() }
        var function = Function(
            hasKeywords: !keywords.isEmpty, inputs: try pairs(ids, types), outputs: try self.ids())
        for _ in 0..<(try count(itemBytes: 10)) { try node(&function) }
        return function
    }

    private mutating func node(_ function: inout Function) throws {
        let id = try integer(UInt64.self)
        if try bool() {
            function.primitives.append(try primitive(id))
        } else if try bool() {
            let constant = try constants[id] ?? constant()
            constants[id] = constant
            function.constants[id] = constant
        } else if !function.inputs.contains(where: { $0.id == id }) {
            throw damaged
        }
    }

    private mutating func primitive(_ id: UInt64) throws -> Primitive {
        let inputs = try ids()
        _ = try integer(Int32.self)  // the stream's index
        let device = try integer(Int32.self)
        guard try integer(Int32.self) == 0 else { throw damaged }
        let name = try text()
        guard let allowed = allowed.primitives[name] else {
            guard name.utf8.count <= 50, name.allSatisfy({ $0.isASCII && $0.isLetter }) else { throw damaged }
            throw MeSPError("the primitive \(name) is not supported")
        }
        var (integers, numbers, lists) = ([Int](), [Double](), [[Int]]())
        for code in allowed.state {
            switch code {
            case "i": integers.append(Int(try integer(Int32.self)))
            case "B": integers.append(Int(try integer(UInt8.self)))
            case "?": integers.append(try bool() ? 1 : 0)
            case "f": numbers.append(Double(Float(bitPattern: try integer(UInt32.self))))
            case "d": numbers.append(Double(bitPattern: try integer(UInt64.self)))
            default: lists.append(try shape())
            }
        }
        let siblings = try integer(UInt64.self)
        var outputs: [(id: UInt64, type: ArrayType)]
        if siblings == 0 {
            outputs = [(id, try array())]
        } else {
            let ids = try self.ids()
            let shapes = try list(itemBytes: 8) { try $0.shape() }
            let elements = try list(itemBytes: 5) { try $0.element() }
            guard ids.contains(id), shapes.count == elements.count, siblings == ids.count - 1 else { throw damaged }
            outputs = try pairs(ids, zip(shapes, elements).map(array))
        }
        return Primitive(
            name: name, allowed: allowed, device: device, integers: integers, numbers: numbers, lists: lists,
            inputs: inputs, outputs: outputs)
    }

    private mutating func constant() throws -> Constant {
        let type = try array()
        let count = elementCount(type.shape)
        let data = try bytes(count * bytesOfElement(type.element))
        func greatest<Integer: FixedWidthInteger>(_: Integer.Type) -> UInt64? {
            let values = data.withUnsafeBytes { data in
                (0..<count).lazy.map {
                    Integer(
                        littleEndian: data.loadUnaligned(
                            fromByteOffset: $0 * MemoryLayout<Integer>.size, as: Integer.self))
                }.reduce(into: (least: Integer.max, greatest: Integer.min)) {
                    $0 = (min($0.least, $1), max($0.greatest, $1))
                }
            }
            return count > 0 && values.least >= 0 ? UInt64(values.greatest) : nil
        }
        switch type.element {
        case .uint8: return Constant(type: type, greatest: greatest(UInt8.self))
        case .uint32: return Constant(type: type, greatest: greatest(UInt32.self))
        case .uint64: return Constant(type: type, greatest: greatest(UInt64.self))
        case .int32: return Constant(type: type, greatest: greatest(Int32.self))
        case .bool, .float32, .float16, .bfloat16: return Constant(type: type, greatest: nil)
        }
    }

    private mutating func array() throws -> ArrayType { try array(shape(), element()) }

    private func array(_ shape: [Int], _ element: ElementType) throws -> ArrayType {
        guard shape.allSatisfy({ $0 >= 0 }) else { throw damaged }
        let (size, overflow) = elementCount(shape).multipliedReportingOverflow(by: bytesOfElement(element))
        guard shape.count <= allowed.limits.dimensions, !overflow, size <= allowed.limits.arrayBytes else {
            throw MeSPError("it has an array that is too large")
        }
        return ArrayType(shape: shape, element: element)
    }

    private func bytesOfElement(_ element: ElementType) -> Int { allowed.types[element]?[1] ?? 0 }

    private mutating func element() throws -> ElementType {
        let (code, bytes) = (Int(try integer(Int32.self)), Int(try integer(UInt8.self)))
        guard let element = allowed.element([code, bytes]) else {
            throw MeSPError("it has an array of a type that is not supported")
        }
        return element
    }

    private func pairs(_ ids: [UInt64], _ types: [ArrayType]) throws -> [(id: UInt64, type: ArrayType)] {
        guard ids.count == types.count, Set(ids).count == ids.count else { throw damaged }
        return zip(ids, types).map { ($0, $1) }
    }

    private mutating func ids() throws -> [UInt64] { try list(itemBytes: 8) { try $0.integer(UInt64.self) } }

    private mutating func shape() throws -> [Int] { try list(itemBytes: 4) { Int(try $0.integer(Int32.self)) } }

    private mutating func text() throws -> String {
        guard let text = String(bytes: try bytes(count(itemBytes: 1)), encoding: .utf8) else { throw damaged }
        return text
    }

    private mutating func list<Item>(itemBytes: Int, _ item: (inout Self) throws -> Item) throws -> [Item] {
        var items = [Item]()
        for _ in 0..<(try count(itemBytes: itemBytes)) { items.append(try item(&self)) }
        return items
    }

    private mutating func count(itemBytes: Int) throws -> Int {
        let count = try integer(UInt64.self)
        guard count <= UInt64((file.count - position) / itemBytes) else { throw damaged }
        return Int(count)
    }

    private mutating func bool() throws -> Bool {
        let byte = try integer(UInt8.self)
        guard byte <= 1 else { throw damaged }
        return byte == 1
    }

    private mutating func integer<Integer: FixedWidthInteger>(_: Integer.Type) throws -> Integer {
        let bytes = try bytes(MemoryLayout<Integer>.size)
        return Integer(littleEndian: bytes.withUnsafeBytes { $0.loadUnaligned(as: Integer.self) })
    }

    private mutating func bytes(_ count: Int) throws -> Data {
        guard count <= file.count - position else { throw damaged }
        defer { position += count }
        return file[(file.startIndex + position)..<(file.startIndex + position + count)]
    }
}

/// Returns the product of dimensions, or `Int.max` if it overflows.
private func elementCount(_ shape: some Sequence<Int>) -> Int {
    shape.reduce(1) { product, size in
        let (next, overflow) = product.multipliedReportingOverflow(by: size)
        return overflow ? .max : next
    }
}

// MARK: - Checking

private struct FunctionCheck {
    let allowed: AllowedPrimitives
    let device: Int32
    var known = [UInt64: ArrayType]()
    var greatest = [UInt64: UInt64]()

    mutating func check(_ function: Function) throws -> FunctionSignature {
        guard !function.hasKeywords else { throw FunctionSignature.isAnother }
        for (id, type) in function.inputs { try add(id, type) }
        for (id, constant) in function.constants {
            try add(id, constant.type)
            greatest[id] = constant.greatest
        }
        for primitive in function.primitives { try check(primitive) }
        return FunctionSignature(inputs: function.inputs.map(\.type), outputs: try types(of: function.outputs))
    }

    private mutating func check(_ primitive: Primitive) throws {
        guard primitive.device == device, primitive.allowed.device.map({ $0 == device }) ?? true else {
            throw MeSPError("\(primitive.name) is for another device")
        }
        let inputs = try types(of: primitive.inputs)
        let outputs = primitive.outputs.map(\.type)
        guard zip(primitive.integers, primitive.allowed.allowed ?? []).allSatisfy({ $1.contains($0) }),
            primitive.allowed.inputs.map({ $0 == inputs.count }) ?? true,
            primitive.allowed.empty ?? false || !(inputs + outputs).contains(where: { $0.shape.contains(0) }),
            results(of: primitive, inputs) == outputs,
            !(primitive.allowed.changes ?? false) || outputs != Array(inputs.prefix(1)),
            let kind = primitive.allowed.rule == .select ? inputs[1] : inputs.first ?? outputs.first,
            primitive.allowed.types.contains(kind.element)
        else { throw MeSPError("the inputs, outputs or parameters of \(primitive.name) do not match") }
        if primitive.allowed.rule == .gather {
            let top = greatest[primitive.inputs[1]] ?? (inputs[1].element == .uint8 ? 255 : nil)
            guard let top, top < inputs[0].shape[primitive.lists[0][0]] else {
                throw MeSPError("the indices of \(primitive.name) may be out of bounds")
            }
        }
        for (id, type) in primitive.outputs { try add(id, type) }
        // `x & c` is at most c. The integer 0 is MLX's code of bitwise AND.
        if primitive.name == "Broadcast" || primitive.name == "BitwiseBinary" && primitive.integers == [0],
            let top = primitive.inputs.compactMap({ greatest[$0] }).min()
        {
            for (id, _) in primitive.outputs { greatest[id] = top }
        }
    }

    private mutating func add(_ id: UInt64, _ type: ArrayType) throws {
        guard known.updateValue(type, forKey: id) == nil else { throw MeSPError("two of its arrays have the same id") }
    }

    private func types(of ids: [UInt64]) throws -> [ArrayType] {
        try ids.map { id in
            guard let type = known[id] else { throw MeSPError("it uses an array before it is computed") }
            return type
        }
    }

    private func results(of primitive: Primitive, _ inputs: [ArrayType]) -> [ArrayType]? {
        let (integers, lists) = (primitive.integers, primitive.lists)
        let counts =
            switch primitive.allowed.rule {
            case .arange: 0...0
            case .compare, .gather, .norm: 2...2
            case .product: 2...3
            case .select, .rope: 3...3
            case .attention, .quantized: 3...4
            case .elementwise: 1...Int.max
            case .concatenate: 2...Int.max
            case .depends: primitive.outputs.count...Int.max
            default: 1...1
            }
        guard counts.contains(inputs.count) else { return nil }
        guard let x = inputs.first else { return arange(primitive) }

        switch primitive.allowed.rule {
        case .arange: return nil
        case .elementwise: return inputs.allSatisfy { $0 == x } ? [x] : nil
        case .compare: return x == inputs[1] ? [ArrayType(shape: x.shape, element: .bool)] : nil
        case .select:
            let condition = ArrayType(shape: inputs[1].shape, element: .bool)
            return x == condition && inputs[1] == inputs[2] ? [inputs[1]] : nil
        case .depends: return Array(inputs.prefix(primitive.outputs.count))
        case .convert: return allowed.element(integers).map { [ArrayType(shape: x.shape, element: $0)] }
        case .view:
            guard let last = x.shape.last, let element = allowed.element(integers),
                let bytes = allowed.types[x.element]?[1],
                last * bytes % integers[1] == 0
            else { return nil }
            return [ArrayType(shape: x.shape.dropLast() + [last * bytes / integers[1]], element: element)]
        case .broadcast:
            let fits =
                lists[0].count >= x.shape.count
                && zip(x.shape, lists[0].suffix(x.shape.count)).allSatisfy { $0 == 1 || $0 == $1 }
            return fits ? [ArrayType(shape: lists[0], element: x.element)] : nil
        case .reshape: return reshaped(x, lists[0])
        case .expand:
            let count = x.shape.count + lists[0].count
            guard count <= allowed.limits.dimensions, isAscending(lists[0], below: count) else { return nil }
            return [lists[0].reduce(x) { $0.replacing($1..<$1, with: [1]) }]
        case .squeeze:
            guard isAscending(lists[0], below: x.shape.count), lists[0].allSatisfy({ x.shape[$0] == 1 }) else {
                return nil
            }
            return [lists[0].reversed().reduce(x) { $0.replacing($1..<($1 + 1), with: []) }]
        case .flatten:
            let (first, last) = (integers[0], integers[1])
            guard first >= 0, first < last, last < x.shape.count else { return nil }
            return [x.replacing(first..<(last + 1), with: [elementCount(x.shape[first...last])])]
        case .unflatten:
            let place = integers[0]
            guard x.shape.indices.contains(place), !lists[0].isEmpty, lists[0].allSatisfy({ $0 >= 0 }),
                elementCount(lists[0]) == x.shape[place]
            else { return nil }
            return [x.replacing(place..<(place + 1), with: lists[0])]
        case .transpose:
            guard lists[0].sorted() == Array(x.shape.indices) else { return nil }
            return [ArrayType(shape: lists[0].map { x.shape[$0] }, element: x.element)]
        case .slice: return slice(x, starts: lists[0], stops: lists[1], steps: lists[2])
        case .split:
            let place = integers[0]
            guard x.shape.indices.contains(place), (1..<10).contains(lists[0].count) else { return nil }
            let ends = [0] + lists[0] + [x.shape[place]]
            let sizes = zip(ends, ends.dropFirst()).map { $1 - $0 }
            guard sizes.allSatisfy({ $0 >= 0 }) else { return nil }
            return sizes.map { x.replacing(place..<(place + 1), with: [$0]) }
        case .concatenate:
            let place = integers[0]
            guard x.shape.indices.contains(place) else { return nil }
            func sized(_ type: ArrayType, _ size: Int) -> ArrayType {
                type.replacing(place..<(place + 1), with: [size])
            }
            guard inputs.allSatisfy({ $0.shape.count == x.shape.count && sized($0, 0) == sized(x, 0) }) else {
                return nil
            }
            return [sized(x, inputs.reduce(0) { $0 + $1.shape[place] })]
        case .gather:
            let sizes = lists[1]
            guard lists[0].count == 1, sizes.count == x.shape.count, sizes.indices.contains(lists[0][0]),
                sizes[lists[0][0]] == 1,
                zip(sizes, x.shape).allSatisfy({ 0 <= $0 && $0 <= $1 })
            else { return nil }
            return [ArrayType(shape: inputs[1].shape + sizes, element: x.element)]
        case .reduce:
            guard !lists[0].isEmpty, isAscending(lists[0], below: x.shape.count) else { return nil }
            return [lists[0].reduce(x) { $0.replacing($1..<($1 + 1), with: [1]) }]
        case .scan: return x.shape.indices.contains(integers[1]) ? [x] : nil
        case .softmax: return x.shape.isEmpty ? nil : [x]
        case .norm:
            guard let last = x.shape.last else { return nil }
            return inputs[1] == ArrayType(shape: [last], element: x.element) ? [x] : nil
        case .product: return product(inputs, adds: primitive.name == "AddMM")
        case .quantized: return quantized(inputs, integers)
        case .rope:
            let turned = integers[0]
            guard x.shape.count == 4, turned % 2 == 0, turned >= 2, turned <= x.shape[3],
                inputs[1] == ArrayType(shape: [], element: .int32),
                inputs[2] == ArrayType(shape: [turned / 2], element: .float32)
            else { return nil }
            return [x]
        case .attention: return attention(inputs, isCausal: integers[0] == 1, others: integers.dropFirst())
        }
    }

    private func isAscending(_ places: [Int], below end: Int) -> Bool {
        places.allSatisfy { 0 <= $0 && $0 < end } && zip(places, places.dropFirst()).allSatisfy { $0 < $1 }
    }

    private func arange(_ primitive: Primitive) -> [ArrayType]? {
        let numbers = primitive.numbers
        guard primitive.allowed.rule == .arange, numbers.allSatisfy(\.isFinite), numbers[2] != 0,
            primitive.outputs.count == 1
        else { return nil }
        let length = ((numbers[1] - numbers[0]) / numbers[2]).rounded(.up)
        guard length.isFinite, length <= Double(Int32.max) else { return nil }
        return [ArrayType(shape: [Int(max(0, length))], element: primitive.outputs[0].type.element)]
    }

    private func reshaped(_ x: ArrayType, _ sizes: [Int]) -> [ArrayType]? {
        var shape = sizes
        let count = elementCount(x.shape)
        if let place = shape.firstIndex(of: -1) {
            shape.remove(at: place)
            let others = elementCount(shape)
            guard others > 0 else { return nil }
            shape.insert(count / others, at: place)
        }
        guard shape.allSatisfy({ $0 >= 0 }), elementCount(shape) == count else { return nil }
        return [ArrayType(shape: shape, element: x.element)]
    }

    private func slice(_ x: ArrayType, starts: [Int], stops: [Int], steps: [Int]) -> [ArrayType]? {
        guard [starts.count, stops.count, steps.count].allSatisfy({ $0 == x.shape.count }) else { return nil }
        var shape = [Int]()
        for (index, size) in x.shape.enumerated() {
            let (start, stop, step) = (starts[index], stops[index], steps[index])
            guard 0 <= start, start <= stop, stop <= size, step >= 1 else { return nil }
            let count = (stop - start + step - 1) / step
            guard step == 1 || count != 1 else { return nil }
            shape.append(count)
        }
        return [ArrayType(shape: shape, element: x.element)]
    }

    private func product(_ inputs: [ArrayType], adds: Bool) -> [ArrayType]? {
        let (a, b) = (inputs[0].shape, inputs[1].shape)
        guard a.count >= 2, a.count == b.count, a.dropLast(2) == b.dropLast(2), a[a.count - 1] == b[b.count - 2],
            inputs[0].element == inputs[1].element
        else { return nil }
        let output = ArrayType(shape: a.dropLast() + b.suffix(1), element: inputs[0].element)
        return Array(inputs.dropFirst(2)) == (adds ? [output] : []) ? [output] : nil
    }

    private func quantized(_ inputs: [ArrayType], _ integers: [Int]) -> [ArrayType]? {
        let (x, w) = (inputs[0], inputs[1].shape)
        let (group, bits, mode) = (integers[0], integers[1], integers[2])
        guard allowed.quantizations["\(mode)"]?.contains([bits, group]) ?? false, integers[3] == 1,
            let k = x.shape.last, k % group == 0, w.count == 2,
            inputs[1] == ArrayType(shape: [w[0], k * bits / 32], element: .uint32)
        else { return nil }
        let scales = ArrayType(shape: [w[0], k / group], element: mode == 0 ? x.element : .uint8)
        guard Array(inputs.dropFirst(2)) == Array(repeating: scales, count: mode == 0 ? 2 : 1) else { return nil }
        return [x.replacing((x.shape.count - 1)..<x.shape.count, with: [w[0]])]
    }

    /// - Parameter others: MLX's further flags, which must be 0.
    private func attention(_ inputs: [ArrayType], isCausal: Bool, others: ArraySlice<Int>) -> [ArrayType]? {
        let (q, k) = (inputs[0].shape, inputs[1].shape)
        guard others.allSatisfy({ $0 == 0 }), q.count == 4, k.count == 4, k[0] == q[0], k[3] == q[3],
            inputs[1].element == inputs[0].element, inputs[1] == inputs[2], q[1] % k[1] == 0, q[2] <= k[2]
        else { return nil }
        let kernels = allowed.attention
        if q[2] > kernels.short {
            guard kernels.longDims.contains(q[3]) else { return nil }
        } else {
            guard kernels.shortDims.contains(q[3]), q[2] * (q[1] / k[1]) <= kernels.shortRows else { return nil }
        }
        let mask = ArrayType(shape: [q[0], q[1], q[2], k[2]], element: .bool)
        return Array(inputs.dropFirst(3)) == (isCausal ? [] : [mask]) ? [inputs[0]] : nil
    }
}
