import CHostMLX
import Dispatch
import Foundation

public enum MLXRandom {

    public static func key(_ seed: UInt64) -> MLXArray {
        MLXArray(host_random_key(seed))
    }

    public static func split(key: MLXArray, into num: Int, stream: StreamOrDevice = .default) -> [MLXArray] {
        let keys = withExtendedLifetime(key) { MLXArray(host_random_split(key.ctx, num.int32, stream.ctx)) }
        return keys.map { $0 }
    }

    public static func split(key: MLXArray, stream: StreamOrDevice = .default) -> (MLXArray, MLXArray) {
        let keys = withExtendedLifetime(key) { arrays(consuming: host_random_split_pair(key.ctx, stream.ctx)) }
        return keys.isEmpty ? (.mlxNone, .mlxNone) : (keys[0], keys[1])
    }

    public static func uniform(
        _ range: Range<some HasDType>, _ shape: some Collection<Int> = [],
        type: (some HasDType & BinaryFloatingPoint).Type = Float.self,
        key: (some RandomStateOrKey)? = MLXArray?.none, stream: StreamOrDevice = .default
    ) -> MLXArray {
        uniform(
            low: MLXArray(range.lowerBound), high: MLXArray(range.upperBound), Array(shape), dtype: type.dtype,
            key: key,
            stream: stream)
    }

    public static func uniform(
        _ range: Range<Float> = 0..<1, _ shape: some Collection<Int> = [],
        type: (some HasDType & BinaryFloatingPoint).Type = Float.self,
        key: (some RandomStateOrKey)? = MLXArray?.none, stream: StreamOrDevice = .default
    ) -> MLXArray {
        uniform(
            low: MLXArray(range.lowerBound), high: MLXArray(range.upperBound), Array(shape), dtype: type.dtype,
            key: key,
            stream: stream)
    }

    public static func uniform(
        low: some ScalarOrArray, high: some ScalarOrArray, _ shape: (some Collection<Int>)? = [Int]?.none,
        type: (some HasDType & BinaryFloatingPoint).Type = Float.self,
        key: (some RandomStateOrKey)? = MLXArray?.none, stream: StreamOrDevice = .default
    ) -> MLXArray {
        uniform(low: low, high: high, shape, dtype: type.dtype, key: key, stream: stream)
    }

    public static func uniform(
        low: some ScalarOrArray, high: some ScalarOrArray, _ shape: (some Collection<Int>)? = [Int]?.none,
        dtype: DType, key: (some RandomStateOrKey)? = MLXArray?.none, stream: StreamOrDevice = .default
    ) -> MLXArray {
        let (low, high) = toArrays(low, high)
        let shape = shape?.asInt32 ?? low.shape.asInt32
        let key = resolve(key: key)
        return withExtendedLifetime((low, high, key)) {
            MLXArray(host_random_uniform(low.ctx, high.ctx, shape, shape.count, dtype.code, key.ctx, stream.ctx))
        }
    }

    public static func normal(
        _ shape: some Collection<Int> = [], type: (some HasDType & BinaryFloatingPoint).Type = Float.self,
        loc: Float = 0, scale: Float = 1, key: (some RandomStateOrKey)? = MLXArray?.none,
        stream: StreamOrDevice = .default
    ) -> MLXArray {
        normal(shape, dtype: type.dtype, loc: loc, scale: scale, key: key, stream: stream)
    }

    public static func normal(
        _ shape: some Collection<Int> = [], dtype: DType, loc: Float = 0, scale: Float = 1,
        key: (some RandomStateOrKey)? = MLXArray?.none, stream: StreamOrDevice = .default
    ) -> MLXArray {
        let key = resolve(key: key)
        return withExtendedLifetime(key) {
            MLXArray(
                host_random_normal(shape.asInt32, shape.count, dtype.code, loc, scale, key.ctx, stream.ctx))
        }
    }

    public static func randInt<T>(
        _ range: Range<T>, _ shape: some Collection<Int> = [], key: (some RandomStateOrKey)? = MLXArray?.none,
        stream: StreamOrDevice = .default
    ) -> MLXArray where T: HasDType, T: BinaryInteger {
        randInt(
            low: MLXArray(range.lowerBound), high: MLXArray(range.upperBound), Array(shape), type: T.self, key: key,
            stream: stream)
    }

    public static func randInt(
        low: some ScalarOrArray, high: some ScalarOrArray, _ shape: (some Collection<Int>)? = [Int]?.none,
        key: (some RandomStateOrKey)? = MLXArray?.none, stream: StreamOrDevice = .default
    ) -> MLXArray {
        let (low, high) = toArrays(low, high)
        return randInt(low, high, shape, low.dtype, key, stream)
    }

    public static func randInt(
        low: some ScalarOrArray, high: some ScalarOrArray, _ shape: (some Collection<Int>)? = [Int]?.none,
        type: (some HasDType & BinaryInteger).Type, key: (some RandomStateOrKey)? = MLXArray?.none,
        stream: StreamOrDevice = .default
    ) -> MLXArray {
        let (low, high) = toArrays(low, high)
        return randInt(low, high, shape, type.dtype, key, stream)
    }

    private static func randInt(
        _ low: MLXArray, _ high: MLXArray, _ shape: (some Collection<Int>)?, _ dtype: DType,
        _ key: (some RandomStateOrKey)?, _ stream: StreamOrDevice
    ) -> MLXArray {
        let shape = shape?.asInt32 ?? low.shape.asInt32
        let key = resolve(key: key)
        return withExtendedLifetime((low, high, key)) {
            MLXArray(host_random_randint(low.ctx, high.ctx, shape, shape.count, dtype.code, key.ctx, stream.ctx))
        }
    }

    public static func categorical(
        _ logits: MLXArray, axis: Int = -1, shape: (some Collection<Int>)? = [Int]?.none,
        key: (some RandomStateOrKey)? = MLXArray?.none, stream: StreamOrDevice = .default
    ) -> MLXArray {
        let key = resolve(key: key)
        return withExtendedLifetime((logits, key)) {
            guard let shape = shape?.asInt32 else {
                return MLXArray(host_random_categorical(logits.ctx, axis.int32, key.ctx, stream.ctx))
            }
            return MLXArray(
                host_random_categorical_shape(logits.ctx, axis.int32, shape, shape.count, key.ctx, stream.ctx))
        }
    }

    public static func categorical(
        _ logits: MLXArray, axis: Int = -1, count: Int, key: (some RandomStateOrKey)? = MLXArray?.none,
        stream: StreamOrDevice = .default
    ) -> MLXArray {
        let key = resolve(key: key)
        return withExtendedLifetime((logits, key)) {
            MLXArray(host_random_categorical_count(logits.ctx, axis.int32, count.int32, key.ctx, stream.ctx))
        }
    }
}

// MARK: - State

public protocol RandomStateOrKey {
    func asRandomKey() -> MLXArray
}

extension MLXArray: RandomStateOrKey {
    public func asRandomKey() -> MLXArray { self }
}

extension MLXRandom {

    public class RandomState: RandomStateOrKey, Updatable, @unchecked Sendable {
        private var state: MLXArray
        private let lock = NSLock()

        /// Creates a state with a seed from the clock.
        public init() {
            state = MLXRandom.key(DispatchTime.now().uptimeNanoseconds)
        }

        public init(seed: UInt64) {
            state = MLXRandom.key(seed)
        }

        public func innerState() -> [MLXArray] {
            lock.withLock { [state] }
        }

        public func next() -> MLXArray {
            lock.withLock {
                let (first, second) = MLXRandom.split(key: state)
                state = first
                return second
            }
        }

        public func seed(_ seed: UInt64) {
            lock.withLock { state = MLXRandom.key(seed) }
        }

        public func asRandomKey() -> MLXArray { next() }
    }

    public static let globalState = RandomState()

    @TaskLocal fileprivate static var taskState: MLXRandom.RandomState?
}

/// Returns the key that `key` is or provides. The default is the next key of the task's state or, if the task has none, of the global state.
public func resolve(key: (some RandomStateOrKey)? = MLXArray?.none) -> MLXArray {
    key?.asRandomKey() ?? MLXRandom.taskState?.asRandomKey() ?? MLXRandom.globalState.next()
}

// MARK: - Free functions

public func split(key: MLXArray, into num: Int, stream: StreamOrDevice = .default) -> [MLXArray] {
    MLXRandom.split(key: key, into: num, stream: stream)
}

public func split(key: MLXArray, stream: StreamOrDevice = .default) -> (MLXArray, MLXArray) {
    MLXRandom.split(key: key, stream: stream)
}
