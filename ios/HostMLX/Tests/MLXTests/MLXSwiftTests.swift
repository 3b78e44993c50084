import Foundation
import MLX
import Testing

/// Returns the names of the `known` MLX operations in the graph of `f`, in the order of the exported file.
private func operations(of f: @escaping ([MLXArray]) -> [MLXArray], on argument: MLXArray) throws -> [String] {
    let file = TemporaryFile("mlxfn")
    try exportFunction(to: file.url, f)(argument)

    // In the file, an integer of eight bytes with the length of the name precedes each name.
    let known = [
        "Broadcast", "ExpandDims", "Gather", "RandomBits", "Reshape", "Slice", "Scatter", "Split", "Squeeze",
        "Transpose",
    ]
    let contents = try Data(contentsOf: file.url)
    var found: [(position: Int, name: String)] = []
    for name in known {
        let entry = withUnsafeBytes(of: UInt64(name.utf8.count).littleEndian) { Data($0) } + Data(name.utf8)
        var rest = contents
        while let range = rest.range(of: entry) {
            found.append((range.lowerBound, name))
            rest = rest[range.upperBound...]
        }
    }
    return found.sorted { $0.position < $1.position }.map { $0.name }
}

@Sendable private func ignore(_ error: String) {}

extension AllTests {
    @Suite struct MLXSwiftTests {
        let matrix = MLXArray(0..<12, [3, 4])
        let failing = { MLXArray.zeros([2]) + MLXArray.zeros([3]) }

        @Test func operationsOfIndices() throws {
            func expect(
                _ indices: any MLXArrayIndex..., are expected: [String],
                sourceLocation: SourceLocation = #_sourceLocation
            ) throws {
                let names = try operations(of: { [$0[0][indices]] }, on: matrix)
                #expect(names == expected, sourceLocation: sourceLocation)
            }
            let i = MLXArray([0, 1])
            try expect(1, are: ["Gather", "Squeeze"])
            try expect(1..., are: ["Slice"])
            try expect(0..., 1, are: ["Slice", "Reshape"])
            try expect(0..., 1..., are: ["Slice"])
            try expect(.newAxis, are: ["ExpandDims"])
            try expect(.newAxis, 1, are: ["Slice"])
            try expect(i, are: ["Gather", "Squeeze"])
            try expect(i, 1..., are: ["Gather", "Reshape", "Slice"])
            try expect(1..., i, are: ["Reshape", "Broadcast", "Broadcast", "Gather", "Reshape"])
            try expect(i, i, are: ["Gather", "Reshape"])
        }

        @Test func operationsOfAnAddedRow() throws {
            let names = try operations(
                of: { [$0[0].at[MLXArray([0, 2])].add(MLXArray(0..<8, [2, 4]))] }, on: matrix)
            #expect(names == ["Reshape", "Scatter"])
        }

        @Test func operationsOfASplitKey() throws {
            let names = try operations(
                of: { keys in [MLXRandom.split(key: keys[0]).1] }, on: MLXRandom.key(1))
            #expect(names == ["RandomBits", "Split", "Reshape"])
        }

        @Test func failedArguments() throws {
            let file = TemporaryFile("mlxfn")
            try exportFunction(to: file.url) { [$0[0] + 1] }(matrix)
            let f = try importFunction(from: file.url)
            do {
                try withError { errors in
                    let x = failing()
                    let error = #expect(throws: MLXError.self) { try f(x) }
                    #expect(error?.localizedDescription.contains("Called with 0 positional inputs") == true)
                    try errors.check()
                }
            } catch {
                #expect(error.localizedDescription.contains("broadcast"))
            }
            let arrays = TemporaryFile("safetensors")
            try withErrorHandler(ignore) {
                try save(arrays: ["a": matrix, "b": failing()], url: arrays.url)
            }
            #expect(try loadArrays(url: arrays.url).keys.sorted() == ["a"])
        }

        @Test func failedKeys() {
            let error = #expect(throws: MLXError.self) {
                try withError { _ = MLXRandom.split(key: failing()) }
            }
            #expect(error?.localizedDescription.contains("broadcast") == true)
        }

        @Test func traps() async {
            await #expect(processExitsWith: .failure) {
                withErrorHandler(ignore) { _ = (MLXArray.zeros([2]) + MLXArray.zeros([3])).description }
            }
            await #expect(processExitsWith: .failure) {
                withErrorHandler(ignore) {
                    _ = (MLXArray.zeros([2]) + MLXArray.zeros([3])).asData(access: .noCopy)
                }
            }
            await #expect(processExitsWith: .failure) { _ = MLXArray.zeros([0, 3]).T.asArray(Float.self) }
            await #expect(processExitsWith: .failure) { _ = MLXArray.zeros([0, 3]).T.asData() }
            await #expect(processExitsWith: .failure) {
                _ = MLXArray(UnsafeBufferPointer<Int32>(start: nil, count: 0))
            }
            await #expect(processExitsWith: .failure) { _ = MLXArray([1, 2])[0, 0] }
            await #expect(processExitsWith: .failure) { _ = MLXArray(0)[0...] }
            await #expect(processExitsWith: .failure) { _ = MLXArray([1])[.ellipsis, .ellipsis] }
            await #expect(processExitsWith: .failure) {
                withErrorHandler(ignore) { _ = (MLXArray.zeros([2]) + MLXArray.zeros([3])).item(Float.self) }
            }
        }

        @Test func emptyArrays() {
            #expect(MLXArray.zeros([0, 3]).asData().data.isEmpty)
            #expect(MLXArray([Float]()).asArray(Float.self) == [])
            #expect(matrix[0..<0].asArray(Int32.self) == [])
            #expect(matrix[0..<0].asData(access: .noCopy).data.isEmpty)
            #expect(MLXArray(Data(), [0], dtype: .int32).size == 0)
            for none in [MLXArray.zeros([0]), MLXArray.zeros([0, 32]), MLXArray.zeros([32, 0])] {
                for result in [none + none, none * 2, exp(none), sigmoid(none), none.sum(), softmax(none, axis: 0)] {
                    #expect(result.asArray(Float.self).count == result.size)
                }
            }
            let rows = MLXArray.zeros([0, 32])
            #expect(MLXFast.rmsNorm(rows, weight: MLXArray.ones([32]), eps: 1e-5).asArray(Float.self) == [])
            #expect(addMM(rows, rows, MLXArray.ones([32, 32])).asArray(Float.self) == [])
        }

        @Test func rangesBeyondTheEnds() {
            let x = MLXArray(0..<6)
            #expect(x[4..<9].asArray(Int.self) == [4, 5])
            #expect(x[8..<9].shape == [0])
            #expect(x[-9 ..< -2].asArray(Int.self) == [0, 1, 2, 3])
            #expect(x[...(-2)].asArray(Int.self) == [0, 1, 2, 3, 4])
            // The range ...(-1) ends at index -1 + 1 = 0, so it is empty.
            #expect(x[...(-1)].shape == [0] && x[-3 ... -1].shape == [0])
        }
    }
}
