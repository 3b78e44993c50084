import MeSPBundle

/// Returns the number in bfloat16, rounded to nearest, ties to even.
func bfloat16(_ number: Float) -> UInt16 {
    guard !number.isNaN else { return 0x7FC0 }
    let bits = number.bitPattern
    return UInt16(truncatingIfNeeded: (bits &+ (bits >> 16 & 1) &+ 0x7FFF) >> 16)
}

/// Returns a float16 number as float32. `Float16` is missing on Intel Macs.
func float32(ofFloat16 bits: UInt16) -> Float {
    let sign = UInt32(bits & 0x8000) << 16
    let (exponent, fraction) = (UInt32(bits >> 10 & 0x1F), UInt32(bits & 0x3FF))
    switch exponent {
    case 0:
        let magnitude = Float(fraction) * 0x1p-24
        return sign == 0 ? magnitude : -magnitude
    case 0x1F: return Float(bitPattern: sign | 0x7F80_0000 | fraction << 13)
    default: return Float(bitPattern: sign | (exponent + 112) << 23 | fraction << 13)
    }
}

/// Converts packed 1-bit codes into packed 2-bit codes. The lowest bits come first.
func packedIn2Bits(_ bytes: UnsafeRawBufferPointer) -> [UInt8] {
    [UInt8](unsafeUninitializedCapacity: 2 * bytes.count) { made, length in
        for (index, byte) in bytes.enumerated() {
            var wide = UInt16(byte)
            wide = (wide | wide << 4) & 0x0F0F
            wide = (wide | wide << 2) & 0x3333
            wide = (wide | wide << 1) & 0x5555
            made[2 * index] = UInt8(truncatingIfNeeded: wide)
            made[2 * index + 1] = UInt8(wide >> 8)
        }
        length = 2 * bytes.count
    }
}

/// A conversion of numbers to float32: (x + offset) / divisor.
struct NumberConversion {
    let from: ElementType
    let offset: Float
    let divisor: Float

    var isIdentity: Bool { from == .float32 && offset == 0 && divisor == 1 }

    func convert(_ bytes: UnsafeRawBufferPointer) -> [UInt8] {
        let count = bytes.count / from.dtype.size
        return [UInt8](unsafeUninitializedCapacity: 4 * count) { made, length in
            for index in 0..<count {
                let bits = ((number(bytes, index) + offset) / divisor).bitPattern.littleEndian
                UnsafeMutableRawBufferPointer(made).storeBytes(of: bits, toByteOffset: 4 * index, as: UInt32.self)
            }
            length = 4 * count
        }
    }

    private func number(_ bytes: UnsafeRawBufferPointer, _ index: Int) -> Float {
        func half() -> UInt16 {
            UInt16(littleEndian: bytes.loadUnaligned(fromByteOffset: 2 * index, as: UInt16.self))
        }
        return switch from {
        case .float16: float32(ofFloat16: half())
        case .bfloat16: Float(bitPattern: UInt32(half()) << 16)
        default:
            Float(
                bitPattern: UInt32(littleEndian: bytes.loadUnaligned(fromByteOffset: 4 * index, as: UInt32.self)))
        }
    }
}
