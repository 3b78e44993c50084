import Foundation
import MLX
import Testing

/// Serializes the suites, because some tests measure the memory of the process.
@Suite(.serialized) enum AllTests {}

/// Expects equal shapes, and elements within an absolute or relative difference of 1e-5.
func expectClose(
    _ array: MLXArray, _ expected: [Float], _ shape: [Int]? = nil, sourceLocation: SourceLocation = #_sourceLocation
) {
    #expect(array.shape == shape ?? [expected.count], sourceLocation: sourceLocation)
    let values = array.asArray(Float.self)
    let close =
        values.count == expected.count && zip(values, expected).allSatisfy { abs($0 - $1) <= 1e-5 * max(1, abs($1)) }
    #expect(close, "\(values) is not \(expected)", sourceLocation: sourceLocation)
}

extension AllTests {
    @Suite struct ArrayTests {

        @Test func scalarsHaveTheirTypes() {
            #expect(MLXArray(3).dtype == .int32)
            #expect(MLXArray(Int32(3)).dtype == .int32)
            #expect(MLXArray(int64: 3).dtype == .int64)
            #expect(MLXArray(Int64(3)).dtype == .int64)
            #expect(MLXArray(true).dtype == .bool)
            #expect(MLXArray(Float(1)).dtype == .float32)
            #expect(MLXArray(1.5).dtype == .float32)
            #expect(MLXArray(1.5, dtype: .bfloat16).dtype == .bfloat16)
            #expect(MLXArray(3, dtype: .uint8).item(Int.self) == 3)
            #expect(MLXArray([1, 2, 3]).dtype == .int32)
            #expect(MLXArray(0..<3).dtype == .int32)
            #expect(MLXArray([1, 2, 3] as [UInt8]).dtype == .uint8)
            #expect(DType.allCases.map { $0.size } == [1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 2, 8, 8])
        }

        @Test func scalarOperandsTakeTheArraysType() {
            let half = MLXArray.ones([2], dtype: .bfloat16)
            #expect((half * 2.5).dtype == .bfloat16)
            #expect((Float(2.5) + half).dtype == .bfloat16)
            #expect((half - 1).dtype == .bfloat16)
            let integers = MLXArray([1, 2])
            #expect((integers * 2).dtype == .int32)
            #expect((integers * 2.5).dtype == .float32)
            #expect((integers / 2).dtype == .float32)
            #expect((MLXArray([true, false]) + 1).dtype == .int32)
            #expect((MLXArray([1, 2] as [UInt32]) & 1).dtype == .uint32)
            #expect(maximum(half, 0.0).dtype == .bfloat16)
            #expect((integers .< 2).asArray(Bool.self) == [true, false])
        }

        @Test func shapesAndSizes() {
            let x = MLXArray.zeros([2, 3, 4], dtype: .float16)
            #expect(x.shape == [2, 3, 4] && x.ndim == 3 && x.size == 24 && x.nbytes == 48)
            #expect(x.dim(-1) == 4 && x.dim(0) == 2 && x.count == 2)
            #expect(MLXArray(1).shape == [])
        }

        @Test func elementsInRowMajorOrder() {
            let x = MLXArray(0..<6, [2, 3])
            #expect(x.T.asArray(Int32.self) == [0, 3, 1, 4, 2, 5])
            #expect(x[0..., 1].asArray(Int.self) == [1, 4])
            #expect(broadcast(MLXArray(7), to: [2, 2]).asArray(Int32.self) == [7, 7, 7, 7])
            #expect(x.asArray(Float.self) == [0, 1, 2, 3, 4, 5])
            #expect(MLXArray([] as [Float]).asArray(Float.self) == [])
            let data = x.T.asData()
            #expect(data.shape == [3, 2] && data.strides == [2, 1] && data.dType == .int32)
            #expect(x.T.asData(access: .noCopy).strides == [1, 3])
        }

        @Test func items() {
            #expect(MLXArray(3.75).item(Float.self) == 3.75)
            #expect(MLXArray(3.75).item(Int.self) == 3)
            #expect(MLXArray([-7] as [Int8]).item(Int.self) == -7)
            #expect(MLXArray(true).item(Int.self) == 1)
            let sum: Double = MLXArray([1, 2]).sum().item()
            #expect(sum == 3)
        }

        @Test func updates() {
            let x = MLXArray([1, 2, 3] as [Float])
            let alias = x
            x._updateInternal(x * 2)
            expectClose(alias, [2, 4, 6])
            #expect("\(x)" == "array([2, 4, 6], dtype=float32)")
            #expect(x.map { $0.item(Float.self) } == [2, 4, 6])
        }

        @Test func factories() {
            expectClose(MLXArray.full([2], values: MLXArray(3.0)), [3, 3])
            expectClose(MLXArray.eye(2), [1, 0, 0, 1], [2, 2])
            expectClose(MLXArray.arange(1, 7, step: 2), [1, 3, 5])
            expectClose(MLXArray.zeros(like: MLXArray([1, 2])), [0, 0])
            expectClose(repeated(MLXArray([1, 2]), count: 2, axis: 0), [1, 1, 2, 2])
            #expect(MLXArray.arange(3).dtype == .int32)
            #expect(MLXArray.zeros([1]).dtype == .float32 && MLXArray.ones([1], type: Int16.self).dtype == .int16)
        }

        @Test func typesAsJSON() throws {
            let data = try JSONEncoder().encode([DType.bfloat16, .float64])
            #expect(String(data: data, encoding: .utf8) == "[12,11]")
            #expect(try JSONDecoder().decode([DType].self, from: data) == [.bfloat16, .float64])
        }
    }
}
