import Foundation
import MLX
import Testing

private final class Box<Value>: @unchecked Sendable {
    var value: Value?
}

private func onAnotherThread<R>(_ body: @escaping @Sendable () throws -> R) throws -> R {
    let (box, ended) = (Box<Result<R, any Error>>(), DispatchSemaphore(value: 0))
    Thread.detachNewThread {
        box.value = Result { try body() }
        ended.signal()
    }
    ended.wait()
    return try #require(box.value).get()
}

/// Every thread may use the streams that Swift creates. A stream that C++ creates belongs to one thread.
extension AllTests {
    @Suite struct ThreadTests {
        private func expectNoStream(sourceLocation: SourceLocation = #_sourceLocation, _ body: () throws -> Void) {
            let error = #expect(throws: MLXError.self, sourceLocation: sourceLocation) { try withError { try body() } }
            #expect(
                error?.localizedDescription.contains("There is no Stream(cpu, ") == true, sourceLocation: sourceLocation
            )
        }

        @Test func anyThreadEvaluatesAnOperation() throws {
            let box = Box<MLXArray>()
            try onAnotherThread { box.value = MLXArray([1, 2]) + 1 }
            #expect(try #require(box.value).asArray(Int.self) == [2, 3])
            try onAnotherThread { box.value = matmul(MLXArray.ones([2, 2]), MLXArray.ones([2, 2])) + 1 }
            #expect(try onAnotherThread { box.value?.sum().item(Float.self) } == 12)
        }

        @Test func noOtherThreadEvaluatesADerivative() throws {
            let box = Box<MLXArray>()
            try onAnotherThread {
                let a = MLXArray([1, 2] as [Float])
                box.value = vjp({ [$0[0] * $0[0]] }, primals: [a], cotangents: [a]).1[0]
            }
            expectNoStream { eval(try #require(box.value)) }
            // Other threads may read a derivative that is already evaluated.
            try onAnotherThread {
                let a = MLXArray([1, 2] as [Float])
                let gradient = vjp({ [$0[0] * $0[0]] }, primals: [a], cotangents: [a]).1[0]
                eval(gradient)
                box.value = gradient
            }
            #expect(try #require(box.value).asArray(Float.self) == [2, 8])
        }

        @Test func noOtherThreadReadsTheConstantsOfAFunction() throws {
            let file = TemporaryFile("mlxfn")
            let constant = MLXArray([3, 4] as [Float])
            try exportFunction(to: file.url) { [$0[0] + constant] }(MLXArray.zeros([2]))
            let (path, function) = (file.url, Box<ImportedFunction>())
            try onAnotherThread { function.value = try importFunction(from: path) }
            let imported = try #require(function.value)
            expectNoStream { eval(try imported(MLXArray.ones([2]))) }
            // Once the thread that imported a function has evaluated a result, other threads may call the function.
            try onAnotherThread {
                let imported = try importFunction(from: path)
                eval(try imported(MLXArray.zeros([2])))
                function.value = imported
            }
            let read = try #require(function.value)
            let sum = try read(MLXArray.ones([2]))[0]
            #expect(sum.asArray(Float.self) == [4, 5])
        }
    }
}
