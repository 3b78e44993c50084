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
        low: some ScalarOrArray, high: some ScalarOrArray, _ shape: (some Collection<Int>)? = [Int]?.none,
        type: (some HasDType & BinaryFloatingPoint).Type = Float.self,
        key: (some RandomStateOrKey)? = MLXArray?.none, stream: StreamOrDevice = .default
    ) -> MLXArray {
        let (low, high) = toArrays(low, high)
        let shape = shape?.asInt32 ?? low.shape.asInt32
        let key = resolve(key: key)
        return withExtendedLifetime((low, high, key)) {
            MLXArray(host_random_uniform(low.ctx, high.ctx, shape, shape.count, type.dtype.code, key.ctx, stream.ctx))
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
            MLXArray(host_random_normal(shape.asInt32, shape.count, dtype.code, loc, scale, key.ctx, stream.ctx))
        }
    }

    public static func randInt(
        low: some ScalarOrArray, high: some ScalarOrArray, _ shape: (some Collection<Int>)? = [Int]?.none,
        type: (some HasDType & BinaryInteger).Type, key: (some RandomStateOrKey)? = MLXArray?.none,
        stream: StreamOrDevice = .default
    ) -> MLXArray {
        let (low, high) = toArrays(low, high)
        let shape = shape?.asInt32 ?? low.shape.asInt32
        let key = resolve(key: key)
        return withExtendedLifetime((low, high, key)) {
            MLXArray(host_random_randint(low.ctx, high.ctx, shape, shape.count, type.dtype.code, key.ctx, stream.ctx))
        }
    }

    public static func categorical(
        _ logits: MLXArray, axis: Int = -1, key: (some RandomStateOrKey)? = MLXArray?.none,
        stream: StreamOrDevice = .default
    ) -> MLXArray {
        let key = resolve(key: key)
        return withExtendedLifetime((logits, key)) {
            MLXArray(host_random_categorical(logits.ctx, axis.int32, key.ctx, stream.ctx))
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

    public class RandomState: RandomStateOrKey, @unchecked Sendable {
        private var state: MLXArray
        private let lock = NSLock()

        /// Creates a state with a seed from the clock.
        public init() {
            state = MLXRandom.key(DispatchTime.now().uptimeNanoseconds)
        }

        public init(seed: UInt64) {
            state = MLXRandom.key(seed)
        }

        public func asRandomKey() -> MLXArray {
            lock.withLock {
                let (first, second) = MLXRandom.split(key: state)
                state = first
                return second
            }
        }
    }

    fileprivate static let globalState = RandomState()
}

private func resolve(key: (some RandomStateOrKey)?) -> MLXArray {
    key?.asRandomKey() ?? MLXRandom.globalState.asRandomKey()
}
