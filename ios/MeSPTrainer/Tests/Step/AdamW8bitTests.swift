import Foundation
import MLX
import Testing

@testable import MeSPCore

@Suite(.serialized) struct AdamW8bitTests {
    @Test(arguments: Fixture.cases, [true, false])
    func quantizesAsTheReference(_ folder: URL, _ signed: Bool) throws {
        let fixture = try Fixture(folder, "gradients")
        try fixture.bundle.withDevice {
            let map = DynamicQuantization(signed: signed)
            let name = signed ? "signed" : "unsigned"
            let (codes, scales) = (try fixture.array(name), try fixture.array("\(name)_scales"))
            let moments = try fixture.array("moments")
            let rows = map.quantized(signed ? moments : abs(moments))
            #expect(rows.shape == DynamicQuantization.shape(codes.size) && rows.dtype == .uint8)
            #expect(rows[0..., 4...].reshaped([-1])[..<codes.size].arrayEqual(codes).item(Bool.self))
            #expect(rows[0..., ..<4].view(dtype: .float32).reshaped([-1]).arrayEqual(scales).item(Bool.self))

            let back = map.dequantized(rows, count: codes.size)
            #expect(relativeError(back, signed ? moments : abs(moments)) < 0.02)
        }
    }

    @Test func zeroBytesAreZeros() {
        let zeros = DynamicQuantization(signed: true).dequantized(
            MLXArray.zeros(DynamicQuantization.shape(300), dtype: .uint8), count: 300)
        #expect(zeros.shape == [300] && zeros.square().sum().item(Float.self) == 0)
    }
}
