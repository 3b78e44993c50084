import CLedgerProbe
import Foundation
import HostMLXLedger
import Testing

@testable import MLX

private let page = 16384
private let pageOfFloats = 4096

private func count(_ rules: LedgerRules = .phone, _ body: () throws -> Void) throws -> Ledger {
    try Ledger.record(rules: rules, body)
}

private func kernels(_ body: () throws -> [MLXArray]) throws -> [String: Int] {
    try count { eval(try body()) }.kinds.mapValues { $0.kernels }
}

private func floats(_ shape: Int...) -> MLXArray {
    MLXArray([Float](repeating: 1, count: shape.reduce(1, *)), shape)
}

@Suite(.serialized, .enabled(if: Ledger.isAvailable, "A ledger is recorded on Linux only"))
struct LedgerTests {

    @Test func countsEvaluationsAndWaits() throws {
        let ledger = try count {
            let x = floats(4)
            let y = exp(x)
            eval(y)
            eval(y)  // is evaluated already
            #expect(exp(y).sum().item(Float.self) == 0)
            let z = exp(x)
            asyncEval([z])
            z.eval()
            z.eval()
        }
        #expect(ledger.evals == 2)
        #expect(ledger.asyncEvals == 1)
        #expect(ledger.waits == 1)
        #expect(ledger.kinds.mapValues { $0.kernels } == ["unary": 3, "reduce": 1])
    }

    @Test func whatTheCPUEvaluatesIsNoRoundTrip() throws {
        let ledger = try count {
            let y = exp(floats(4), stream: .cpu)
            eval(y)
            #expect(log(y, stream: .cpu).sum(stream: .cpu).item(Float.self) == 0)
        }
        #expect(ledger.evals == 0)
        #expect(ledger.commandBuffers == 0)
        #expect(ledger.kernels == 0)
        let both = try count { eval(exp(exp(floats(4), stream: .cpu))) }
        #expect(both.evals == 1)
        #expect(both.commandBuffers == 1)
        #expect(both.kernels == 1)
    }

    @Test func countsBytesAndFlop() throws {
        let ledger = try count {
            let x = floats(64, 32)
            eval(matmul(x, floats(32, 128)) + floats(128))
        }
        #expect(ledger.flop == 2 * 64 * 32 * 128)
        #expect(ledger.kinds["gemm"]?.readBytes == Double(4 * (64 * 32 + 32 * 128)))
        #expect(ledger.kinds["gemm"]?.writtenBytes == Double(4 * 64 * 128))
        #expect(ledger.kinds["binary"]?.readBytes == Double(4 * (64 * 128 + 128)))
        let time = LedgerTime()
        let seconds = 200e-6 + 2 * 6e-6 + (ledger.readBytes + ledger.writtenBytes) / 80e9 + ledger.flop / 1.2e12
        #expect(abs(ledger.seconds(time) - seconds) < 1e-12)
    }

    @Test func valuesAreComputedWhenAsked() throws {
        var values = [Float]()
        let body = {
            let x = MLXArray([1, 2, 3, 4] as [Float], [2, 2])
            let y = (matmul(x, x.T) + 1)[0..., 1...].reshaped([2])
            values = y.asArray(Float.self)
        }
        let computed = try Ledger.record(compute: true, device: .cpu, body)
        #expect(values == [12, 26])
        #expect(try Ledger.record(compute: false, device: .cpu, body).kinds == computed.kinds)
        #expect(values == [0, 0])
    }

    @Test func filesAreReadWhenAsked() throws {
        let url = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString + ".safetensors")
        defer { try? FileManager.default.removeItem(at: url) }
        try save(arrays: ["x": MLXArray([1, 2, 3] as [Float])], url: url)
        var values = [Float]()
        let ledger = try Ledger.record(compute: true, device: .cpu) {
            values = try (#require(loadArrays(url: url)["x"]) * 2).asArray(Float.self)
        }
        #expect(values == [2, 4, 6])
        #expect(ledger.kernels == 1)
    }

    @Test func aPrimitiveWithoutARuleFails() throws {
        #expect(throws: MLXError.caught("[ledger] There is no rule for the primitive ArgSort.")) {
            try count { eval(argSort(floats(4), axis: 0)) }
        }
        #expect(throws: LedgerError.self) {
            try count { _ = try? withError { eval(argSort(floats(4), axis: 0)) } }
        }
        #expect(try count { eval(exp(floats(4))) }.kernels == 1)
    }

    @Test func oneLedgerAtATime() throws {
        _ = try count {
            #expect(throws: LedgerError.self) { try count {} }
        }
    }

    private func randomGraph(seed: UInt64) -> [MLXArray] {
        var state = seed
        func random(_ bound: Int) -> Int {
            state = state &* 6_364_136_223_846_793_005 &+ 1_442_695_040_888_963_407
            return Int(state >> 33) % bound
        }
        var nodes = [MLXArray]()
        for size in 1...120 {
            let inputs = nodes.isEmpty ? [] : (0..<random(4)).map { _ in nodes[random(nodes.count)] }
            nodes.append(withVector(inputs) { MLXArray(probe_source($0, Int32(size))) })
        }
        return Array(nodes[90...])
    }

    private func evaluatedProbes() -> [Int] {
        var sizes = [Int](repeating: 0, count: 4096)
        return Array(sizes[0..<probe_log(&sizes, sizes.count)])
    }

    @Test(arguments: 1...20) func theOrderIsThatOfMLX(seed: UInt64) throws {
        _ = evaluatedProbes()
        eval(randomGraph(seed: seed))
        let expected = evaluatedProbes()
        #expect(expected.count > 60)
        var order = [Int]()
        let trace = { (_: String, size: Int) in order.append(size) }
        _ = try Ledger.record(device: .cpu, rules: .cpu, trace: trace) { eval(randomGraph(seed: seed)) }
        #expect(order == expected)
    }

    private func randomSums(seed: UInt64) -> [MLXArray] {
        var state = seed
        func random(_ bound: Int) -> Int {
            state = state &* 6_364_136_223_846_793_005 &+ 1_442_695_040_888_963_407
            return Int(state >> 33) % bound
        }
        func source() -> MLXArray { withVector([MLXArray]()) { MLXArray(probe_source($0, 100_000)) } }
        var open = (0..<12).map { _ in source() }
        var kept = [MLXArray]()
        while open.count > 1 {
            let a = open.remove(at: random(open.count))
            let b = open.remove(at: random(open.count))
            let sum = withExtendedLifetime((a, b)) { MLXArray(probe_add(a.ctx, b.ctx)) }
            open.append(sum)
            switch random(4) {
            case 0: kept.append(a)
            case 1: open.append(b)
            case 2: open.append(a.reshaped([10, -1]).reshaped([-1]))
            default: break
            }
            if open.count > 16 { open.removeLast(8) }
            if kept.count > 30 { break }
        }
        return open + kept
    }

    @Test(arguments: 1...20) func thePeakIsThatOfMLX(seed: UInt64) throws {
        Stream.cpu.synchronize()
        let before = Memory.activeMemory
        Memory.peakMemory = 0
        eval(randomSums(seed: seed))
        Stream.cpu.synchronize()
        let peak = Memory.peakMemory
        #expect(peak - before > 5 * 400_000)
        let ledger = try Ledger.record(device: .cpu, rules: .cpu) {
            eval(randomSums(seed: seed))
        }
        #expect(ledger.peakBytes == peak)
    }

    @Test func aChainIsWrittenOverItself() throws {
        let ledger = try count {
            let source = floats(pageOfFloats * 4)
            var x = source
            for _ in 0..<45 { x = exp(x) }
            eval(x)
            withExtendedLifetime(source) {}
        }
        // 45 kernels make command buffers of 21, 21 and 3 kernels. Besides `source` there is one new buffer, which later results overwrite.
        #expect(ledger.commandBuffers == 3)
        #expect(ledger.newBuffers == 2)
        #expect(ledger.peakArrays == 2)
        #expect(ledger.peakActiveBytes - baseline() == 2 * 4 * page)
    }

    private func baseline() -> Int { Memory.activeMemory }

    /// Evaluates 42 chained products. With an iPhone's rules they take three command buffers, the last of which only ends the evaluation.
    private func products(_ body: () -> Void = {}) {
        let x = floats(64, 64)
        let w = floats(64, 64)
        var y = x
        for _ in 0..<42 { y = matmul(y, w) }
        eval(y)
        body()
    }

    @Test func inputsAreHeldUntilTheirBufferIsComplete() throws {
        let before = baseline()
        // x, w and the 42 products take one page each. The encoder is so far ahead that none is freed.
        let ahead = try count(.phone) { products() }
        #expect(ahead.commandBuffers == 3)
        #expect(ahead.peakArrays == 44)
        #expect(ahead.peakBytes - before == 44 * page)
        // The peak is x, w, the last of the first 21 products, and the other 21 products.
        let none = try count(.fastPhone) { products() }
        #expect(none.peakArrays == 24)
        #expect(none.peakActiveBytes - before == 24 * page)
        #expect(none.newBuffers == 24)
        #expect(none.newBuffers == ahead.newBuffers - 20)
    }

    @Test func whatIsHeldIsNotWrittenOver() throws {
        let body = {
            var x: MLXArray? = floats(64, 64)
            let results = x.map { [exp($0), log($0)] } ?? []
            x = nil
            eval(results)
        }
        // By the rules of `phone`, the first operation's incomplete command buffer still holds x, so the second operation cannot overwrite x.
        #expect(try count(.phone, body).newBuffers == 3)
        let each = LedgerRules(isMetal: true, operationsPerBuffer: 0, megaElementsPerBuffer: 40, runAhead: 0)
        #expect(try count(each, body).newBuffers == 2)
    }

    @Test func theEncoderIsAheadByTenBuffers() throws {
        let ledger = try count {
            let x = floats(64, 64)
            var y = x
            for _ in 0..<(21 * 20) { y = matmul(y, x) }
            eval(y)
        }
        // Eleven command buffers, one of which is being encoded, hold 21 inputs each. The newest product and x are alive too.
        #expect(ledger.peakArrays == 21 * 11 + 2)
    }

    @Test func theMemoryLimitHoldsTheEncoderBack() throws {
        let limit = Memory.memoryLimit
        defer { Memory.memoryLimit = limit }
        let before = baseline()
        let ledger = try count {
            Memory.memoryLimit = Memory.activeMemory + 30 * page
            products()
        }
        // x, w, the 21 products of the first buffer and 8 more take 31 pages. Then the encoder waits until the first buffer is complete.
        #expect(ledger.peakArrays == 31)
        #expect(ledger.peakActiveBytes - before == 31 * page)
    }

    @Test func theLastBuffersArraysOutliveAnEvaluation() throws {
        let before = baseline()
        func alive(_ rules: LedgerRules, then: () -> Void = {}) throws -> Int {
            var alive = 0
            _ = try count(rules) {
                let x = floats(64, 64)
                eval(matmul(matmul(x, x), x))
                then()
                Memory.clearCache()
                alive = Memory.activeMemory - before
                withExtendedLifetime(x) {}
            }
            return alive / page
        }
        #expect(try alive(.phone) == 1)
        #expect(try alive(.strictPhone) == 3)
        #expect(try alive(.strictPhone) { eval(MLXArray.arange(4)) } == 1)
    }

    private func rules(lateHandlers: Int) -> LedgerRules {
        LedgerRules(
            isMetal: true, operationsPerBuffer: 20, megaElementsPerBuffer: 40, runAhead: 10, lateHandlers: lateHandlers)
    }

    @Test(arguments: [0, 1, 3, 8]) func lateHandlersKeepTheArraysOfTheirBuffers(_ late: Int) throws {
        let before = baseline()
        var (alive, synchronized) = (0, 0)
        let ledger = try count(rules(lateHandlers: late)) {
            let x = floats(64, 64)
            for _ in 0..<6 { eval(matmul(x, x)) }
            Memory.clearCache()
            alive = Memory.activeMemory - before
            Stream.gpu.synchronize()
            Memory.clearCache()
            synchronized = Memory.activeMemory - before
            withExtendedLifetime(x) {}
        }
        #expect(alive == (1 + min(late, 6)) * page)
        #expect(synchronized == page)
        #expect(ledger.waits == 1)
        #expect(ledger.mostInFlight == min(max(late, 1), 7))
    }

    @Test func waitsForATaskRunLateHandlers() throws {
        let limit = Memory.memoryLimit
        defer { Memory.memoryLimit = limit }
        func peak(limited: Bool) throws -> Int {
            try count(rules(lateHandlers: .max)) {
                products()
                if limited { Memory.memoryLimit = Memory.activeMemory }
                products()
            }.peakArrays
        }
        #expect(try peak(limited: false) == 88)
        #expect(try peak(limited: true) == 47)
    }

    @Test func elevenTasksAreLate() throws {
        let ledger = try count(rules(lateHandlers: .max)) {
            let x = floats(64, 64)
            for _ in 0..<40 {
                var y = x
                for _ in 0..<21 { y = matmul(y, x) }
                eval(y)
            }
        }
        #expect(ledger.mostInFlight == 3 * 11 + 1)
    }

    @Test(arguments: [(LedgerRules.strictPhone, 3), (.strictPad, 2), (.strictMac, 1)])
    func otherDevicesCommitLater(_ rules: LedgerRules, buffers: Int) throws {
        #expect(try count(rules) { products() }.commandBuffers == buffers)
        let limit = Memory.memoryLimit
        defer { Memory.memoryLimit = limit }
        let ledger = try count(rules) {
            Memory.memoryLimit = Memory.activeMemory + 25 * page
            products()
        }
        // Memory is short at the 24th product. If the first command buffer ended after 21 products, the encoder waits for it then. If it takes 41 or
        // more, it has not been committed yet.
        #expect(ledger.peakArrays == [3: 26, 2: 43, 1: 44][buffers])
    }

    @Test func waitsForTheLastTaskSpin() throws {
        let limit = Memory.memoryLimit
        defer { Memory.memoryLimit = limit }
        func ledger(pages: Int) throws -> Ledger {
            try count {
                Memory.memoryLimit = Memory.activeMemory + pages * page
                products()
            }
        }
        let short = try ledger(pages: 30)
        #expect(short.spins == 1)
        #expect(short.spinning.kernels == 21)
        #expect(short.spinning.flop == 21 * 2 * 64 * 64 * 64)
        let time = LedgerTime()
        #expect(abs(short.secondsSpinning() - 21 * time.secondsPerKernel) < 23e-6)
        #expect(try ledger(pages: 60).spins == 0)
        let limits = try count(
            LedgerRules(isMetal: true, operationsPerBuffer: 4, megaElementsPerBuffer: 40, runAhead: 10)
        ) {
            Memory.memoryLimit = Memory.activeMemory + 30 * page
            products()
        }
        #expect(limits.spins == 0)
        #expect(limits.peakArrays <= 32)
    }

    @Test func kernelsAreCompiledWhenTheyAreFirstUsed() throws {
        let ledger = try count {
            let (x, y) = (floats(64, 64), floats(64))
            eval(exp(x), log(x))
            Ledger.boundary()
            eval(exp(x), exp(y), exp(x.asType(.bfloat16)))  // a copy, and exp of another type
            Ledger.boundary()
            eval(log(x[0..., ..<32]), exp(x))  // log of an array with gaps
        }
        #expect(ledger.firstKernels == 5)
        #expect(ledger.mostFirstKernels == 2)
    }

    @Test func restartingForgetsNoKernel() throws {
        let ledger = try count {
            eval(exp(floats(4)))
            Ledger.restart()
            eval(exp(floats(4)))
        }
        #expect(ledger.kernels == 1)
        #expect(ledger.firstKernels == 1)
    }

    @Test func theCacheServesSimilarSizes() throws {
        func newBuffers(after former: Int, _ size: Int) throws -> Int {
            let body = { (bytes: Int) in eval(MLXArray.arange(bytes / 4)) }
            let one = try count { body(former) }.newBuffers
            return try count {
                body(former)
                body(size)
            }.newBuffers - one
        }
        #expect(try newBuffers(after: 3 * page, 3 * page) == 0)
        #expect(try newBuffers(after: 3 * page, 2 * page + 4) == 0)  // also three pages
        #expect(try newBuffers(after: 4 * page, 3 * page) == 0)  // less than two pages more
        #expect(try newBuffers(after: 5 * page, 3 * page) == 1)
        #expect(try newBuffers(after: 3 * page, 4 * page) == 1)
        #expect(try newBuffers(after: 1000, 600) == 0)  // less than twice as long
        #expect(try newBuffers(after: 1000, 500) == 1)
    }

    @Test func theCacheCountsUntilItIsCleared() throws {
        let cacheLimit = Memory.cacheLimit
        defer { Memory.cacheLimit = cacheLimit }
        let before = baseline()
        func work(_ between: () -> Void) throws -> Ledger {
            try count {
                eval(MLXArray.arange(8 * pageOfFloats))
                between()
                eval(MLXArray.arange(20 * pageOfFloats))
            }
        }
        Memory.cacheLimit = 1 << 40
        let kept = try work { #expect(Memory.cacheMemory == 8 * page) }
        #expect(kept.peakBytes - before == 28 * page)
        #expect(kept.peakActiveBytes - before == 20 * page)
        let cleared = try work {
            Memory.clearCache()
            #expect(Memory.cacheMemory == 0)
        }
        #expect(cleared.peakBytes - before == 20 * page)
        Memory.cacheLimit = 0
        #expect(try work {}.peakBytes - before == 20 * page)
    }

    @Test func viewsCostNothing() throws {
        let x = floats(4, 6)
        #expect(
            try kernels {
                [
                    x[1..., 2...], x.T, x.reshaped([2, 12]), broadcast(x, to: [3, 4, 6]), x.expandedDimensions(axis: 0),
                    depends(inputs: [x], dependencies: [x])[0], x[..<1], x.split(parts: 2, axis: 1)[1],
                ]
            } == [:])
        #expect(try kernels { [x.T.reshaped([24])] } == ["copy": 1])
        #expect(try kernels { [x.T.reshaped([2, 3, 4])] } == [:])  // splits an axis
        #expect(try kernels { [contiguous(x)] } == [:])
        #expect(try kernels { [contiguous(x.T)] } == ["copy": 1])
        #expect(try kernels { [contiguous(x.T, allowColMajor: true)] } == [:])
    }

    @Test func copies() throws {
        let x = floats(4, 6)
        #expect(try kernels { [x.asType(.bfloat16)] } == ["copy": 1])
        #expect(try kernels { [concatenated([x, x, x])] } == ["copy": 3])
        #expect(try kernels { [MLXArray.zeros([4])] } == ["copy": 1])
        #expect(try kernels { vjp({ [$0[0][1...]] }, primals: [x], cotangents: [floats(3, 6)]).1 } == ["copy": 2])
        #expect(try kernels { [x.take(MLXArray([1, 2]), axis: 0)] } == ["gather": 1])
        #expect(try kernels { [MLXRandom.split(key: MLXRandom.key(1)).0] } == ["random": 1])  // the halves are views
        #expect(try kernels { [which(x .> 0, x, MLXArray(Float(0)))] } == ["binary": 1, "select": 1])
    }

    @Test func reductions() throws {
        #expect(try kernels { [floats(64, 64).sum()] } == ["reduce": 1])  // 4,096 elements
        #expect(try kernels { [floats(64, 65).sum()] } == ["reduce": 2])
        #expect(try kernels { [floats(100, 5000).sum(axis: 1)] } == ["reduce": 1])
        #expect(try kernels { [floats(31, 5000).sum(axis: 0)] } == ["reduce": 1])  // few rows
        #expect(try kernels { [floats(256, 5000).sum(axis: 0)] } == ["reduce": 1])
        #expect(try kernels { [floats(257, 5000).sum(axis: 0)] } == ["reduce": 2])  // many rows
        #expect(try kernels { [floats(257, 32768).sum(axis: 0)] } == ["reduce": 1])  // and enough columns
        #expect(try kernels { [floats(1024, 8).sum(axis: 0)] } == ["reduce": 2])
        #expect(try kernels { [softmax(floats(8, 32), axis: -1)] } == ["softmax": 1])
        #expect(try kernels { [softmax(floats(8, 32).T, axis: -1)] } == ["copy": 1, "softmax": 1])
        #expect(try kernels { [floats(8, 32).logSumExp(axis: -1)] } == ["logsumexp": 1])
        #expect(try kernels { [floats(8, 32).argMax(axis: -1)] } == ["arg_reduce": 1])
        #expect(try count { eval(floats(257, 5000).sum(axis: 0)) }.kinds["reduce"]?.writtenBytes == 4 * 33 * 5000)
    }

    @Test func matrixProducts() throws {
        func product(_ a: MLXArray, _ b: MLXArray) throws -> [String: Int] { try kernels { [matmul(a, b)] } }
        #expect(try product(floats(64, 64), floats(64, 128)) == ["gemm": 1])  // k is less than n
        #expect(try product(floats(64, 256), floats(256, 64)) == ["gemm": 1, "gemm_accumulate": 1])
        #expect(try product(floats(64, 96), floats(96, 64)) == ["gemm": 1])  // k is short
        #expect(try product(floats(513, 600), floats(600, 512)) == ["gemm": 1])
        #expect(try product(floats(512, 600), floats(600, 512)) == ["gemm": 1, "gemm_accumulate": 1])
        #expect(try product(floats(1, 256), floats(256, 64)) == ["gemv": 1])
        #expect(try product(floats(64, 64).T, floats(128, 64).T) == ["gemm": 1])
        #expect(try product(floats(64, 64, 2)[.ellipsis, 0], floats(64, 128)) == ["copy": 1, "gemm": 1])
        // Eight products of 16 rows with one matrix become one product of 128 rows, whose k is split. Products with eight matrices stay separate.
        #expect(try product(floats(8, 16, 256), floats(256, 64)) == ["gemm": 1, "gemm_accumulate": 1])
        #expect(try product(floats(8, 16, 256), floats(8, 256, 64)) == ["gemm": 1])
        #expect(try kernels { [addMM(floats(64), floats(64, 64), floats(64, 128)[0..., ..<64])] } == ["gemm": 1])
        let inParts = try count { eval(matmul(floats(64, 256), floats(256, 64))) }
        #expect(inParts.flop == 2 * 64 * 64 * 256)
        #expect(inParts.kinds["gemm"]?.writtenBytes == 65536)
        #expect(try product(floats(1, 64), floats(64, 1)) == ["gemv": 1, "reduce": 1, "copy": 1])
    }

    /// From GPU generation 15 on, MLX multiplies 2 to 15 rows of 16-bit numbers by a transposed matrix with a matrix–vector kernel if the length of a
    /// row is a multiple of four.
    @Test func productsOfAFewRows() throws {
        func product(
            _ rows: Int, _ dtype: DType = .bfloat16, columns: Int = 256, transpose: Bool = true, generation: Int = 15,
            adds: Bool = false
        ) throws -> [String: Int] {
            let rules = LedgerRules(
                isMetal: true, operationsPerBuffer: 20, megaElementsPerBuffer: 40, runAhead: 10, generation: generation)
            return try count(rules) {
                let x = floats(rows, columns).asType(dtype)
                let w = (transpose ? floats(64, columns) : floats(columns, 64)).asType(dtype)
                let row = floats(64).asType(dtype)
                eval(x, w, row)
                Ledger.restart()
                let matrix = transpose ? w.T : w
                eval(adds ? addMM(row, x, matrix) : matmul(x, matrix))
            }.kinds.mapValues { $0.kernels }
        }
        let inParts = ["gemm": 1, "gemm_accumulate": 1]
        #expect(try product(15) == ["gemv": 1])
        #expect(try product(2, .float16, adds: true) == ["gemv": 1])
        #expect(try product(16) == inParts)
        #expect(try product(15, .float32) == inParts)
        #expect(try product(15, columns: 258) == inParts)  // not a multiple of four
        #expect(try product(15, transpose: false) == inParts)
        #expect(try product(15, generation: 14) == inParts)
    }

    @Test func quantizedProducts() throws {
        let ledgerOfQuantizing = try count {
            let (w, scales, biases) = quantized(floats(2048, 1024), groupSize: 64, bits: 4)
            eval([w, scales] + (biases.map { [$0] } ?? []))
        }
        #expect(ledgerOfQuantizing.kinds.mapValues { $0.kernels } == ["quantize": 1])
        func ledger(
            _ x: [Int], _ w: [Int], transpose: Bool = true, slice: Bool = false, generation: Int = 15
        ) throws -> Ledger {
            let rules = LedgerRules(
                isMetal: true, operationsPerBuffer: 20, megaElementsPerBuffer: 40, runAhead: 10, generation: generation)
            return try count(rules) {
                func shape(_ columns: Int) -> [Int] { w.dropLast() + [columns] }
                let (ones, columns) = (MLXArray.ones(x), w[w.count - 1])
                var words = MLXArray.zeros(shape(columns / 8), dtype: .uint32)
                var scales = MLXArray.ones(shape(columns / 64))
                eval(ones, words, scales)
                Ledger.restart()
                if slice { (words, scales) = (words[0..., ..<64], scales[0..., ..<8]) }
                eval(
                    quantizedMM(
                        ones, words, scales: scales, biases: scales, transpose: transpose, groupSize: 64, bits: 4))
            }
        }
        let w = [2048, 1024]
        let inParts = try ledger([13, 1024], w)
        #expect(counts(inParts) == ["qmm": 1, "reduce": 1])
        #expect(inParts.kinds["qmm"]?.writtenBytes == Double(8 * 13 * 2048 * 4))
        #expect(inParts.flop == 2 * 13 * 2048 * 1024)
        #expect(counts(try ledger([12, 1024], w)) == ["qmv": 1])
        #expect(counts(try ledger([32, 1024], w, generation: 17)) == ["qmv": 1])
        #expect(counts(try ledger([14, 1024], w, generation: 14)) == ["qmm": 1, "reduce": 1])
        #expect(counts(try ledger([160, 1024], w)) == ["qmm": 1])
        #expect(counts(try ledger([2, 32, 1024], [2] + w)) == ["qmm": 1])
        // The first product has 14 parts, one for each group of a row. The second has two, because neither four nor three divides its ten groups.
        #expect(try ledger([256, 896], [128, 896]).kinds["qmm"]?.writtenBytes == Double(14 * 256 * 128 * 4))
        #expect(try ledger([256, 640], [448, 640]).kinds["qmm"]?.writtenBytes == Double(2 * 256 * 448 * 4))
        #expect(counts(try ledger([4, 2048], w, transpose: false)) == ["qmm": 1])
        #expect(counts(try ledger([1, 2048], w, transpose: false)) == ["qvm": 1, "reduce": 1])
        #expect(counts(try ledger([3, 2048], [2048, 192], transpose: false)) == ["qvm": 1, "reduce": 1])
        // MLX copies the words, scales and biases of a slice of columns.
        #expect(counts(try ledger([32, 512], w, slice: true)) == ["copy": 3, "qmm": 1, "reduce": 1])
        #expect(
            try kernels {
                [dequantized(MLXArray.zeros([64, 8], dtype: .uint32), scales: floats(64, 1), biases: floats(64, 1))]
            } == ["copy": 1, "dequantize": 1])
    }

    @Test func quantizedProductsOfFewBits() throws {
        func ledger(
            _ x: [Int], bits: Int, groupSize: Int = 64, transpose: Bool = true, rows: Int = 2048
        ) throws -> Ledger {
            try count {
                let q = quantized(floats(rows, 1024), groupSize: groupSize, bits: bits)
                let ones = MLXArray.ones(x)
                eval([ones, q.wq, q.scales] + (q.biases.map { [$0] } ?? []))
                Ledger.restart()
                eval(
                    quantizedMM(
                        ones, q.wq, scales: q.scales, biases: q.biases, transpose: transpose, groupSize: groupSize,
                        bits: bits))
            }
        }
        for (x, transpose) in [
            ([1, 1024], true), ([64, 1024], true), ([256, 1024], true), ([1, 2048], false), ([64, 2048], false),
        ] {
            let four = try ledger(x, bits: 4, transpose: transpose)
            for bits in [2, 3] {
                let fewer = try ledger(x, bits: bits, transpose: transpose)
                #expect(counts(fewer) == counts(four))
                #expect(fewer.flop == four.flop)
                #expect(four.readBytes - fewer.readBytes == Double((4 - bits) * 2048 * 1024 / 8))
            }
            #expect(counts(try ledger(x, bits: 2, groupSize: 128, transpose: transpose)) == counts(four))
        }
        for (groupSize, parts) in [(64, 16), (128, 8)] {
            let inParts = try ledger([32, 1024], bits: 2, groupSize: groupSize, rows: 512)
            #expect(inParts.kinds["qmm"]?.writtenBytes == Double(parts * 32 * 512 * 4))
        }
    }

    @Test func adoptedMemoryIsActiveButNotInThePeak() throws {
        // On Linux MLX reads a buffer's size from the word before its data.
        let bytes = 64 * page
        let base = UnsafeMutableRawPointer.allocate(byteCount: 2 * page + bytes, alignment: page)
        let data = base + page
        (data - 8).storeBytes(of: bytes, as: Int.self)
        memset(data, 0, bytes)
        let before = baseline()
        let ledger = try count {
            let mapped = MLXArray(rawPointer: data, [bytes / 4], dtype: .float32) { base.deallocate() }
            #expect(Memory.activeMemory - before == bytes)
            eval(exp(mapped[..<pageOfFloats]))
            #expect(Memory.peakMemory - before == bytes + page)
        }
        #expect(ledger.mappings == 1)
        #expect(Memory.activeMemory == before)
        #expect(ledger.peakBytes - before == page)
    }

    private let eps = bytes(of: Float(1e-6))

    private func fused(
        _ name: String, _ state: Data, _ inputs: @autoclosure () -> [MLXArray], _ shape: [Int]
    ) throws -> Ledger {
        try count {
            var inputs: [MLXArray]? = inputs()
            eval(inputs ?? [])
            Memory.clearCache()
            let function = try functionFile(name, state, inputs ?? [], shape)
            defer { try? FileManager.default.removeItem(at: function) }
            let imported = try importFunction(from: function)
            let outputs: [MLXArray] =
                switch inputs?.count {
                case 2: try imported(inputs?[0] ?? .mlxNone, inputs?[1] ?? .mlxNone)
                default: try imported(inputs?[0] ?? .mlxNone, inputs?[1] ?? .mlxNone, inputs?[2] ?? .mlxNone)
                }
            inputs = nil
            eval(outputs)
        }
    }

    private func counts(_ ledger: Ledger) -> [String: Int] { ledger.kinds.mapValues { $0.kernels } }

    @Test func norms() throws {
        let whole = try fused("RMSNorm", eps, [floats(4, 64), floats(64)], [4, 64])
        #expect(counts(whole) == ["rms_norm": 1])
        #expect(whole.newBuffers == 2)  // overwrites its input
        let held = floats(4, 64)
        #expect(try fused("RMSNorm", eps, [held, floats(64)], [4, 64]).newBuffers == 2)
        let columns = try fused("RMSNorm", eps, [floats(64, 4).T, floats(64)], [4, 64])
        #expect(counts(columns) == ["copy": 1, "rms_norm": 1])
    }

    @Test func ropes() throws {
        func state(_ dims: Int32) -> Data {
            bytes(of: dims) + bytes(of: false) + bytes(of: Float(10000)) + bytes(of: Float(1)) + bytes(of: true)
        }
        func rope(_ dims: Int32, _ x: MLXArray) throws -> [String: Int] {
            counts(try fused("RoPE", state(dims), [x, MLXArray(Int32(0))], x.shape))
        }
        #expect(try rope(64, floats(1, 2, 16, 64)) == ["rope": 1])
        #expect(try rope(64, floats(1, 16, 2, 64).transposed(0, 2, 1, 3)) == ["rope": 1])
        #expect(try rope(32, floats(1, 2, 16, 64).transposed(0, 1, 2, 3)[0..., 0..., ..<8]) == ["copy": 1, "rope": 1])
        #expect(try rope(64, floats(2, 16, 64, 2).transposed(0, 3, 1, 2)) == ["copy": 1, "rope": 1])
    }

    @Test func attentions() throws {
        func state(causal: Bool) -> Data {
            bytes(of: Float(0.125)) + bytes(of: causal) + bytes(of: false) + bytes(of: false) + bytes(of: false)
        }
        func attention(_ q: MLXArray, _ k: MLXArray) throws -> Ledger {
            try fused("ScaledDotProductAttention", state(causal: true), [q, k, k], q.shape)
        }
        let full = try attention(floats(1, 4, 32, 64), floats(1, 2, 32, 64))
        #expect(counts(full) == ["attention": 1])
        // 528 query–key pairs · 4 heads · 2 products · 64 dimensions · 2 FLOP.
        #expect(full.flop == 540_672)
        #expect(
            counts(try attention(floats(1, 32, 4, 64).transposed(0, 2, 1, 3), floats(1, 2, 32, 64)))
                == ["attention": 1])
        #expect(
            counts(try attention(floats(1, 4, 64, 32).transposed(0, 1, 3, 2), floats(1, 2, 32, 64)))
                == ["copy": 1, "attention": 1])
        // For a few query rows, attention is one kernel. With at least 4,096 keys and fewer key heads than query heads, it is two kernels.
        #expect(counts(try attention(floats(1, 4, 1, 64), floats(1, 2, 4095, 64))) == ["attention": 1])
        #expect(counts(try attention(floats(1, 4, 1, 64), floats(1, 2, 4096, 64))) == ["attention": 2])
        #expect(counts(try attention(floats(1, 4, 1, 64), floats(1, 4, 4096, 64))) == ["attention": 1])
    }
}

private func bytes<T>(of value: T) -> Data { withUnsafeBytes(of: value) { Data($0) } }

/// Writes a `.mlxfn` file with one primitive, as MLX does on a machine with a GPU (export.cpp:846).
private func functionFile(_ name: String, _ state: Data, _ inputs: [MLXArray], _ shape: [Int]) throws -> URL {
    func list(_ items: [Data]) -> Data { items.reduce(bytes(of: UInt64(items.count)), +) }
    func text(_ text: String) -> Data { list(text.utf8.map { bytes(of: $0) }) }
    func array(_ shape: [Int], _ dtype: DType) -> Data {
        list(shape.map { bytes(of: Int32($0)) }) + bytes(of: dtype.code) + bytes(of: UInt8(dtype.size))
    }
    let ids = inputs.indices.map { bytes(of: UInt64($0 + 1)) }
    let result = bytes(of: UInt64(100))
    var tape = ids.map { $0 + bytes(of: false) + bytes(of: false) }  // inputs have no primitive and no data
    tape.append(
        result + bytes(of: true) + list(ids)
            + bytes(of: Int32(0)) + bytes(of: Int32(1)) + bytes(of: Int32(0))  // the stream of device 1, the GPU
            + text(name) + state + bytes(of: UInt64(0)) + array(shape, inputs[0].dtype))
    let file =
        text(String(cString: probe_mlx_version())) + bytes(of: Int32(1)) + bytes(of: false) + text("") + list([])
        + list(ids) + list(inputs.map { array($0.shape, $0.dtype) }) + list([result]) + list(tape)
    let url = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString + ".mlxfn")
    try file.write(to: url)
    return url
}
