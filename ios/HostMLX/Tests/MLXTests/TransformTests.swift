import Foundation
import MLX
import Testing

final class TemporaryFile {
    let url: URL

    init(_ fileExtension: String) {
        url = FileManager.default.temporaryDirectory.appending(path: "\(UUID().uuidString).\(fileExtension)")
    }

    deinit {
        try? FileManager.default.removeItem(at: url)
    }
}

extension AllTests {
    @Suite struct TransformTests {

        @Test func gradients() {
            let x = MLXArray([1, 2, 3] as [Float])
            let y = MLXArray([4, 5, 6] as [Float])
            let (values, gradients) = vjp(
                { [$0[0] * $0[1], $0[0].sum()] }, primals: [x, y], cotangents: [MLXArray.ones([3]), MLXArray(2.0)])
            expectClose(values[0], [4, 10, 18])
            expectClose(gradients[0], [6, 7, 8])
            expectClose(gradients[1], [1, 2, 3])
        }

        @Test func compiledFunctions() {
            let f = compile { [$0[0] * 2 + $0[1]] }
            expectClose(f([MLXArray([1, 2] as [Float]), MLXArray(1)])[0], [3, 5])
            expectClose(f([MLXArray([1, 2] as [Float]), MLXArray(2)])[0], [4, 6])
        }

        @Test func evaluation() {
            let x = MLXArray(1) + 1
            eval(x, x + 1)
            asyncEval([x + 1])
            #expect(x.item(Int.self) == 2)
        }

        @Test func functionsInFiles() throws {
            let file = TemporaryFile("mlxfn")
            let x = MLXArray([1, 2] as [Float])
            try exportFunction(to: file.url) { [$0[0] * $0[1] + $0[2]] }(x, x, bias: MLXArray(1.0))
            let f = try importFunction(from: file.url)
            expectClose(try f(x, MLXArray([3, 4] as [Float]), bias: MLXArray(2.0))[0], [5, 10])
            #expect(throws: MLXError.self) { try f(x) }

            let exponentials = TemporaryFile("mlxfn")
            try exportFunction(to: exponentials.url) { [exp($0[0]) + softmax($0[0], axis: -1)] }(x)
            let g = try importFunction(from: exponentials.url)
            expectClose(try g(x)[0], [2.718_282 + 0.268_941_4, 7.389_056 + 0.731_058_6])

            var failure: Error?
            let (_, gradients) = vjp(
                { arguments in
                    do {
                        return try f(arguments[0], arguments[1], bias: MLXArray(0.0))
                    } catch {
                        failure = error
                        return []
                    }
                }, primals: [x, MLXArray([3, 4] as [Float])], cotangents: [MLXArray.ones([2])])
            #expect(failure == nil)
            expectClose(gradients[0], [3, 4])
            expectClose(gradients[1], [1, 2])
            #expect(throws: MLXError.self) { try importFunction(from: URL(filePath: "/nowhere.mlxfn")) }
        }

        @Test func safetensors() throws {
            let file = TemporaryFile("safetensors")
            let arrays = ["a": MLXArray([1, 2] as [Float]), "b": MLXArray.zeros([2, 1], dtype: .bfloat16)]
            try save(arrays: arrays, metadata: ["key": "värde"], url: file.url)
            let (loaded, metadata) = try loadArraysAndMetadata(url: file.url)
            #expect(metadata["key"] == "värde")
            #expect(Set(loaded.keys) == ["a", "b"])
            expectClose(try #require(loaded["a"]), [1, 2])
            #expect(loaded["b"]?.shape == [2, 1] && loaded["b"]?.dtype == .bfloat16)
            #expect(try loadArrays(url: file.url).count == 2)
            try save(arrays: [:], url: file.url)
            #expect(try loadArrays(url: file.url).isEmpty)
            #expect(throws: LoadSaveError.self) { try save(arrays: arrays, url: URL(filePath: "/tmp/a.bin")) }
            #expect(throws: MLXError.self) { try loadArrays(url: URL(filePath: "/nowhere.safetensors")) }
        }

        /// The expected values come from Python's `mlx.core.random` with `k = mx.random.key(7)`.
        @Test func randomNumbersAreThoseOfPython() {
            let k = MLXRandom.key(7)
            let keys = MLXRandom.split(key: k, into: 3).flatMap { $0.asArray(UInt32.self) }
            #expect(keys == [276_534_068, 861_967_409, 1_905_761_346, 1_641_862_660, 2_900_896_126, 1_402_713_516])
            expectClose(MLXRandom.normal([3], key: k), [-0.7554662, -0.18615793, -0.11654735])
            expectClose(MLXRandom.uniform(low: -2, high: 3, [3], key: k), [-0.8750769, 0.13080215, 0.26804686])
            #expect(
                MLXRandom.randInt(low: 0, high: 100, [5], type: Int32.self, key: k).asArray(Int.self) == [
                    6, 20, 65, 38, 67,
                ])
            let logits = MLXArray([0.1, 0.2, 0.3, 0.3, 0.2, 0.1] as [Float], [2, 3])
            #expect(MLXRandom.categorical(logits, key: k).asArray(Int.self) == [2, 1])
            let states = [3, 3].map { MLXRandom.RandomState(seed: $0) }
            let numbers = states.map { MLXRandom.normal([2], key: $0).asArray(Float.self) }
            #expect(numbers[0] == numbers[1])
        }

        @Test func errors() throws {
            let x = MLXArray.ones([2, 3])
            #expect(throws: MLXError.self) { try withError { _ = matmul(x, x) } }
            #expect(throws: MLXError.self) { try withError { x.reshaped([5]).eval() } }
            try withError { outer in
                #expect(throws: MLXError.self) {
                    try withError { inner in
                        _ = x.reshaped([5]) + 1
                        try inner.check()
                        Issue.record("not reached")
                    }
                }
                try outer.check()
            }
            do {
                try withError { _ = x.reshaped([5]) }
            } catch let error as MLXError {
                #expect(error.localizedDescription.hasPrefix("MLX Error: [reshape] Cannot reshape"))
            }
            #expect(throws: MLXError.self) {
                try withError { _ = vjp({ [matmul($0[0], x)] }, primals: [x], cotangents: [x]) }
            }
            #expect(try withError { matmul(x, x.T).shape } == [2, 2])
        }

        @Test func devices() {
            #expect(Device.withDefaultDevice(.cpu) { Device.defaultDevice() } == .cpu)
            #expect(Device.cpu.deviceType == .cpu && Device(.cpu) == .cpu)
            #expect(Device(.gpu, index: 1) != Device(.gpu) && Device(.gpu) != .cpu)
            let x = MLXArray([1, 2])
            #expect(abs(x, stream: .cpu).asArray(Int.self) == [1, 2])
            let stream = Stream.cpu
            #expect(StreamOrDevice.stream(stream).stream == stream)
            #expect(Device.withDefaultDevice(.cpu) { Stream.defaultStream } == stream)
            Stream.cpu.synchronize()
        }
    }
}
