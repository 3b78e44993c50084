import MLX
import Testing

extension AllTests {
    @Suite struct IndexingTests {
        let a = MLXArray(0..<24, [2, 3, 4])
        let i = MLXArray([1, 0])

        func expect(
            _ array: MLXArray, _ shape: [Int], _ expected: [Int32]? = nil,
            sourceLocation: SourceLocation = #_sourceLocation
        ) {
            #expect(array.shape == shape, sourceLocation: sourceLocation)
            if let expected {
                #expect(array.asArray(Int32.self) == expected, sourceLocation: sourceLocation)
            }
        }

        @Test func slices() {
            expect(a[1], [3, 4], Array(12..<24))
            expect(a[-1], [3, 4], Array(12..<24))
            expect(a[1, 2], [4], [20, 21, 22, 23])
            expect(a[1, -1, -1], [], [23])
            expect(a[0..<1], [1, 3, 4], Array(0..<12))
            expect(a[0, 1...], [2, 4], Array(4..<12))
            expect(a[0, ..<1], [1, 4], [0, 1, 2, 3])
            expect(a[0, 0, ...1], [2], [0, 1])
            expect(a[0, 0, -2 ..< -1], [1], [2])
            expect(a[0, 0, (-3)...], [3], [1, 2, 3])
            expect(a[.ellipsis, 0], [2, 3], [0, 4, 8, 12, 16, 20])
            expect(a[0, .ellipsis, 1], [3], [1, 5, 9])
            expect(a[.ellipsis, .newAxis], [2, 3, 4, 1])
            expect(a[.newAxis], [1, 2, 3, 4])
            expect(a[0, .newAxis, 1], [1, 4], [4, 5, 6, 7])
            expect(a[[0, 1]], [4], [4, 5, 6, 7])
        }

        @Test func arraysOfIndices() {
            expect(a[i], [2, 3, 4], Array(12..<24) + Array(0..<12))
            expect(a[0..., i], [2, 2, 4], [4, 5, 6, 7, 0, 1, 2, 3, 16, 17, 18, 19, 12, 13, 14, 15])
            expect(a[0, 0..., i], [2, 3], [1, 5, 9, 0, 4, 8])
            expect(a[0..., i, i], [2, 2], [5, 0, 17, 12])
            expect(a[i, 0..., i], [2, 3])
            expect(a[.newAxis, i, .ellipsis], [1, 2, 3, 4])
            expect(a[0..., .newAxis, i, 0...], [2, 1, 2, 4])
            expect(a[0..., i, .newAxis, 0...], [2, 2, 1, 4])
            expect(a[i, .newAxis, 0..., i], [2, 1, 3])
            expect(a[.ellipsis, 0, i], [2, 2])
            expect(a[1..., i, 1..<3], [1, 2, 2], [17, 18, 13, 14])
            expect(a[0..., MLXArray([0, 2], [2, 1]), 1...], [2, 2, 1, 3])
        }

        @Test func rowsAreAddedTo() {
            let rows = MLXArray([1, 0, 1])
            let sum = MLXArray(0..<6, [3, 2]).at[rows].add(MLXArray([10, 20, 30, 40, 50, 60], [3, 2]))
            expect(sum, [3, 2], [30, 41, 62, 83, 4, 5])
            expect(MLXArray(0..<3).at[rows].add(1), [3], [1, 3, 2])
        }

        /// Shows what mlx-swift does with new axes. In the first three cases it ignores the new axis, and NumPy does not.
        @Test func newAxesThatAreIgnored() {
            expect(a[.newAxis, 1...], [1, 3, 4])
            expect(a[.newAxis, 0..., i], [2, 2, 4])
            expect(a[i, .newAxis, 1], [2, 4])
            expect(a[.newAxis, 1], [1, 3, 4])
            expect(a[.newAxis, .newAxis, .newAxis, 1...], [1, 1, 1, 1, 3, 4])
        }
    }
}
