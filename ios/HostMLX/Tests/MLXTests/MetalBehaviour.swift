import Foundation
import HostMLXMetal
import MLX
import Testing

@Suite(.serialized) struct MetalBehaviour {
    #if os(Linux)
        @Test func productsRoundTheirOperandsToTF32() throws {
            // TF32 rounds 1 + 2⁻¹² to 1.
            let a = MLXArray.full([2, 4], values: MLXArray(Float(1) + 0x1p-12))
            let b = MLXArray.ones([4, 2])
            func products() -> [Float] {
                let sum = addMM(MLXArray.ones([2, 2]), a, b)
                return matmul(a, b).asArray(Float.self) + sum.asArray(Float.self)
            }
            let exact = 4 * (Float(1) + 0x1p-12)
            #expect(products() == [Float](repeating: exact, count: 4) + [Float](repeating: exact + 1, count: 4))
            let rounded = try withMetal(.init(tf32: true)) { products() }.result.get()
            #expect(rounded == [Float](repeating: 4, count: 4) + [Float](repeating: 5, count: 4))
        }

        @Test func quantizedProductsRoundTheirOperandsToTF32() throws {
            let w = MLXRandom.normal([64, 64], key: MLXRandom.key(0))
            let (packed, scales, biases) = quantized(w, groupSize: 64, bits: 4)
            let x = MLXRandom.normal([8, 64], key: MLXRandom.key(1))
            func product(transpose: Bool) -> MLXArray {
                let y = quantizedMM(
                    x, packed, scales: scales, biases: biases, transpose: transpose, groupSize: 64, bits: 4)
                eval(y)
                return y
            }
            func error(transpose: Bool) throws -> Float {
                let exact = product(transpose: transpose)
                let metal = try withMetal(.init(tf32: true)) { product(transpose: transpose) }.result.get()
                return ((metal - exact).square().sum().sqrt() / exact.square().sum().sqrt()).item(Float.self)
            }
            #expect(try error(transpose: true) > 1e-5)
            #expect(try error(transpose: true) < 1e-3)
            #expect(try error(transpose: false) == 0)
        }

        @Test func theEnvironmentTurnsTF32Off() throws {
            let a = MLXArray.full([2, 4], values: MLXArray(Float(1) + 0x1p-12))
            setenv("MLX_ENABLE_TF32", "0", 1)
            defer { unsetenv("MLX_ENABLE_TF32") }
            let product = withMetal(.init(tf32: true)) { matmul(a, MLXArray.ones([4, 2])).asArray(Float.self) }
            #expect(try product.result.get()[0] == 4 * (Float(1) + 0x1p-12))
        }
    #endif

    private func failure(_ buffer: Int, _ change: (inout FailingCommandBuffers) -> Void = { _ in }) -> MetalRules {
        var failing = FailingCommandBuffers(first: buffer)
        change(&failing)
        return .init(failingBuffers: failing)
    }

    @Test(arguments: FailingCommandBuffers.Garbage.allCases)
    func theErrorOfABufferIsThrownWhereTheStreamIsWaitedFor(_ garbage: FailingCommandBuffers.Garbage) throws {
        let result = withMetal(failure(2) { $0.garbage = garbage }) {
            try withError { errors in
                let first = MLXArray(Float(1)) + 1
                eval(first)
                let (second, number, view) = (first + 1, first.asType(.int32), first.reshaped([1]))
                eval(second, number, view)
                let third = second + 1
                eval(third)
                try errors.check()
                #expect(first.item(Float.self) == 2)
                #expect(garbage == .zeros ? third.item(Float.self) == 1 : third.item(Float.self).isNaN)
                #expect(number.item(Int.self) == 0)
                #expect(view.item(Float.self) == 2)
                Stream.cpu.synchronize()
                #expect(throws: MLXError.caught(FailingCommandBuffers.hang)) { try errors.check() }
                #expect(
                    throws: Never.self,
                    performing: {
                        try withError {
                            Stream.cpu.synchronize()
                            #expect((first + 1).item(Float.self) == 3)
                        }
                    })
            }
        }.result
        #expect(throws: MLXError.self) { try result.get() }
    }

    @Test func theErrorOfABufferIsThrownInALaterEvaluation() throws {
        let result = withMetal(failure(1) { ($0.delay, $0.count) = (1, 2) }) {
            for _ in 0..<2 {
                let last = MLXArray(Float(1)) + 1
                #expect(throws: MLXError.caught(FailingCommandBuffers.hang)) {
                    try withError { errors in
                        eval(MLXArray(Float(1)) + 1)
                        eval(MLXArray(Float(1)) + 1)
                        try errors.check()
                        eval(last)
                    }
                }
            }
            try withError { #expect((MLXArray(Float(1)) + 1).item(Float.self) == 2) }
        }.result
        #expect(throws: Never.self) { try result.get() }
    }

    #if os(Linux)
        private func refusal(_ allocation: Int) -> MetalRules { failure(allocation) { $0.areAllocations = true } }

        @Test func anAllocationFailsWhereAnArrayIsCreated() {
            let (result, report) = withMetal(refusal(2)) {
                try withError { errors in
                    let (first, second) = (MLXArray([1, 2, 3]), MLXArray([3, 4, 5]))
                    #expect(throws: MLXError.caught("[malloc] Unable to allocate 12 bytes.")) { try errors.check() }
                    #expect(first.shape == [3] && second.shape == [] && (first + second).size == 0)
                    #expect(MLXArray.zeros([3]).asArray(Float.self) == [0, 0, 0])
                }
            }
            #expect(throws: MLXError.self) { try result.get() }
            #expect(report.faults.isEmpty)
        }

        @Test func anAllocationFailsInAnEvaluation() {
            let numbers = MLXArray([1, 2, 3])
            let (result, report) = withMetal(refusal(2)) {
                try withError { errors in
                    let first = numbers.square()
                    let second = concatenated([first, first])
                    eval(second)
                    #expect(throws: MLXError.caught("[malloc] Unable to allocate 24 bytes.")) { try errors.check() }
                    #expect(first.asArray(Int.self) == [1, 4, 9])
                    #expect(second.asArray(Int.self) == [1, 4, 9, 1, 4, 9])
                }
            }
            #expect(throws: MLXError.self) { try result.get() }
            #expect(report.faults.isEmpty)
        }

        @Test func readingTheDataOfAFailedArrayIsAFault() {
            let numbers = MLXArray([1, 2, 3])
            var rules = refusal(1)
            rules.failingBuffers?.count = 2
            let (_, report) = withMetal(rules) {
                try withError {
                    let square = numbers.square()
                    eval(square)
                    return square.asData(access: .copy).data
                }
            }
            #expect(report.faults.values.reduce(0, +) == 1)
        }
    #endif

    @Test func workForTheGPUFails() {
        let a = MLXArray([1, 2, 3])
        let outside = withMetal(.init(gpuByDefault: true)) { try withError { eval(a + 1) } }
        #expect(throws: MLXError.self) { try outside.result.get() }
        let inside = withMetal(.init(gpuByDefault: true)) {
            try withError { Device.withDefaultDevice(.cpu) { eval(a + 1) } }
        }
        #expect(throws: Never.self) { try inside.result.get() }
        // C++ copies the primals on its default device, the GPU.
        let differentiated = withMetal(.init(gpuByDefault: true)) {
            try withError {
                Device.withDefaultDevice(.cpu) { eval(vjp({ [$0[0] * $0[0]] }, primals: [a], cotangents: [a]).1) }
            }
        }
        #expect(throws: MLXError.self) { try differentiated.result.get() }
    }

    #if os(Linux)
        @Test func aGraphForAGPUThatIsMissingIsBuiltAndNotComputed() {
            Stream.makeForMissingGPU()
            Device.withDefaultDevice(Device(.gpu)) {
                let y = matmul(MLXArray.ones([2, 3]), MLXArray.ones([3, 4]))
                #expect(y.shape == [2, 4])
                #expect(throws: MLXError.self) { try withError { eval(y) } }
                #expect(throws: Never.self) { try withError { Stream.gpu.synchronize() } }
            }
            #expect((MLXArray([1, 2]) + 1).asArray(Int.self) == [2, 3])
        }
    #endif
}
