#if os(Linux)

    import Foundation
    import Glibc
    import MLX
    import Synchronization
    import Testing

    private let pageSize = Int(getpagesize())

    private func anonymousMemory() throws -> Int {
        let status = try String(contentsOfFile: "/proc/self/status", encoding: .utf8)
        let line = try #require(status.split(separator: "\n").first { $0.hasPrefix("RssAnon:") })
        return try #require(Int(line.filter { $0.isNumber })) * 1024
    }

    /// Maps a file of `count` float32 ones after an anonymous page. The last word of that page is `lengthWord`, by default the length of the file in
    /// bytes.
    private func mapOnes(_ count: Int, lengthWord: Int? = nil) throws -> UnsafeMutableRawPointer {
        let file = TemporaryFile("bin")
        let block = [Float](repeating: 1, count: 1 << 16).withUnsafeBytes { Data($0) }
        try Data().write(to: file.url)
        let handle = try FileHandle(forWritingTo: file.url)
        for _ in 0..<(count >> 16) {
            try handle.write(contentsOf: block)
        }
        try handle.close()
        let bytes = count * 4
        let base = try #require(
            mmap(nil, pageSize + bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))
        let data = base + pageSize
        (data - 8).storeBytes(of: lengthWord ?? bytes, as: Int.self)
        let descriptor = open(file.url.path, O_RDONLY)
        try #require(mmap(data, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, descriptor, 0) == data)
        close(descriptor)
        return data
    }

    extension AllTests {
        @Suite struct MemoryTests {
            let count = 16 << 20  // 64 MiB

            @Test func mappedFilesAreNotCopied() throws {
                let data = try mapOnes(count)
                let (bytes, page) = (count * 4, pageSize)
                let before = try anonymousMemory()
                let released = Mutex(false)
                var array: MLXArray? = MLXArray(rawPointer: data, [count], dtype: .float32) {
                    munmap(data - page, page + bytes)
                    released.withLock { $0 = true }
                }
                #expect(array?.sum().item(Float.self) == Float(count))
                let view = array?.reshaped([2, -1])[1...]
                view?.eval()
                #expect(try anonymousMemory() - before < 2 << 20)
                #expect(!released.withLock { $0 })
                array = nil
                #expect(view?.sum().item(Float.self) == Float(count / 2))
                #expect(!released.withLock { $0 })
            }

            @Test func mappedFilesAreReleased() throws {
                let data = try mapOnes(1 << 16)
                let released = Mutex(0)
                do {
                    let array = MLXArray(rawPointer: data, [1 << 16], dtype: .float32) { released.withLock { $0 += 1 } }
                    #expect(array[5].item(Float.self) == 1)
                    #expect(released.withLock { $0 } == 0)
                }
                #expect(released.withLock { $0 } == 1)
            }

            @Test func anyMemoryWillDo() throws {
                // The page before `isolated` is not mapped.
                let bytes = pageSize
                let base = try #require(
                    mmap(nil, 2 * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))
                munmap(base, bytes)
                let isolated = base + bytes
                isolated.storeBytes(of: 7, as: Int32.self)
                #expect(MLXArray(rawPointer: isolated, [bytes / 4], dtype: .int32) {}[0].item(Int.self) == 7)
                munmap(isolated, bytes)

                // Memory is copied if it is not aligned, or if the word before it is not its length.
                for (pointer, length) in [
                    (try mapOnes(1 << 16, lengthWord: 3), 1 << 16), (try mapOnes(1 << 16) + 64, 16),
                ] {
                    let released = Mutex(false)
                    let array = MLXArray(rawPointer: pointer, [length], dtype: .float32) {
                        released.withLock { $0 = true }
                    }
                    #expect(released.withLock { $0 })
                    #expect(array.sum().item(Float.self) == Float(length))
                }
            }

            @Test func freedMemoryIsGivenBack() throws {
                let before = try anonymousMemory()
                for _ in 0..<4 {
                    var arrays = (0..<4000).map { MLXArray.zeros([4 << 10]) + Float($0) }
                    eval(arrays)
                    arrays = []
                }
                Memory.clearCache()
                #expect(try anonymousMemory() - before < 4 << 20)
            }

            @Test func accounting() {
                let active = Memory.activeMemory
                Memory.peakMemory = 0
                let x = MLXArray.zeros([1 << 20]) + 1
                x.eval()
                #expect(Memory.activeMemory - active >= 4 << 20)
                #expect(Memory.snapshot().peakMemory >= 4 << 20)
                #expect(Memory.cacheMemory == 0)
                let limit = Memory.memoryLimit
                Memory.memoryLimit = 1 << 30
                #expect(Memory.memoryLimit == 1 << 30)
                Memory.memoryLimit = limit
            }
        }
    }
#endif
