import Foundation

func withFullDisk<R>(isolation: isolated (any Actor)? = #isolation, _ body: () async throws -> R) async rethrows -> R {
    let handler = signal(SIGXFSZ, SIG_IGN)
    let resource = __rlimit_resource_t(RLIMIT_FSIZE.rawValue)
    var limit = rlimit()
    getrlimit(resource, &limit)
    var low = limit
    low.rlim_cur = 100
    setrlimit(resource, &low)
    defer {
        setrlimit(resource, &limit)
        _ = signal(SIGXFSZ, handler)
    }
    return try await body()
}
