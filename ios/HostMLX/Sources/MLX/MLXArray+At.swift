import CHostMLX

extension MLXArray {
    /// Selects elements for an update, as in `a.at[rows].add(values)`.
    public var at: ArrayAt { ArrayAt(array: self) }
}

public struct ArrayAt {
    let array: MLXArray

    public subscript(indices: any MLXArrayIndex..., stream stream: StreamOrDevice = .default) -> ArrayAtIndices {
        ArrayAtIndices(array: array, operations: indices.map { $0.mlxArrayIndexOperation }, stream: stream)
    }
}

public struct ArrayAtIndices {
    let array: MLXArray
    let operations: [MLXArrayIndexOperation]
    let stream: StreamOrDevice

    /// Returns the array with `values` added to the selected elements. Values for the same index are summed.
    public func add(_ values: some ScalarOrArray) -> MLXArray {
        guard operations.count == 1, case .array(let indices) = operations[0], indices.ndim == 1 else {
            fatalError("only one array of rows names what is added to")
        }
        let rest = array.shape.dropFirst()
        let values = broadcast(values.asMLXArray(dtype: array.dtype), to: [indices.dim(0)] + rest, stream: stream)
            .reshaped([indices.dim(0), 1] + rest, stream: stream)
        return withExtendedLifetime((array, indices, values)) {
            MLXArray(host_scatter_add(array.ctx, indices.ctx, values.ctx, stream.ctx))
        }
    }
}
