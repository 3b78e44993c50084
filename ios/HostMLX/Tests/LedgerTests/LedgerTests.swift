import Foundation
import HostMLXLedger
import MLX
import Testing

@Suite(.serialized) struct LedgerTests {

    @Test func countsAnElementwiseGraph() throws {
        let ledger = try Ledger.record {
            let x = MLXArray.zeros([256, 256])  // a copy of a scalar
            let y = exp(x) + x
            eval(y)
            #expect(y.sum().item(Float.self) == 0)
        }
        #expect(ledger.evals == 2)
        #expect(ledger.kinds["unary"]?.kernels == 1)
        #expect(ledger.kinds["binary"]?.kernels == 1)
        print(ledger)
    }
}
