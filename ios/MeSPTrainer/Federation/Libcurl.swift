#if canImport(FoundationNetworking)
    import Foundation
    import FoundationNetworking
    import MeSPFiles
    import MeSPSentences

    /// Sends requests with libcurl, which FoundationNetworking links. On Linux, Foundation can crash when a response is ended early, and decompresses a
    /// response before anybody can refuse it.
    struct CurlTransport: HTTPTransport {
        func send(_ request: URLRequest, most: Int, within seconds: Double) async throws -> (Data, status: Int) {
            let exchange = CurlExchange(request, most: most, seconds: seconds)
            return try await withTaskCancellationHandler {
                try await withCheckedThrowingContinuation { continuation in
                    guard exchange.begin(continuation) else { return }
                    Thread.detachNewThread { exchange.end(Result { try exchange.perform() }) }
                }
            } onCancel: {
                exchange.end(.failure(CancellationError()))
            }
        }
    }

    /// The functions of libcurl. The library is loaded at the first use.
    private enum Libcurl {
        typealias Handle = OpaquePointer
        typealias Take = @convention(c) (UnsafePointer<UInt8>, Int, Int, UnsafeMutableRawPointer) -> Int
        typealias Progress = @convention(c) (UnsafeMutableRawPointer, Int64, Int64, Int64, Int64) -> Int32

        typealias List = OpaquePointer

        nonisolated(unsafe) private static let library: UnsafeMutableRawPointer? = {
            let library = dlopen("libcurl.so.4", RTLD_NOW)
            let start = dlsym(library, "curl_global_init").map {
                unsafeBitCast($0, to: (@convention(c) (Int) -> Int32).self)
            }
            return start?(3) == 0 ? library : nil
        }()

        static let missing = MeSPError("libcurl is missing: on Debian, apt install libcurl4.")

        static func function<F>(_ name: String, _ type: F.Type) throws -> F {
            guard let library, let function = dlsym(library, name) else { throw missing }
            return unsafeBitCast(function, to: type)
        }
    }

    /// A request and its response. Only the thread of `perform` uses the response.
    private final class CurlExchange: @unchecked Sendable {
        typealias Answer = (Data, status: Int)

        private let request: URLRequest
        private let most: Int
        private let seconds: Double
        private let lock = NSLock()
        private var continuation: CheckedContinuation<Answer, any Error>?
        private var hasEnded = false

        private var data = Data()
        private var status = 0
        /// The header fields that decide about the response, by their names in lower case.
        private var fields = [String: String]()
        private var headerBytes = 0
        /// The result of a response that is not read to its end.
        private var early: Result<Answer, any Error>?

        private static let mostHeaderBytes = 1 << 16

        init(_ request: URLRequest, most: Int, seconds: Double) {
            (self.request, self.most, self.seconds) = (request, most, seconds)
        }

        /// Returns whether to perform the request. If the exchange has been cancelled already, throws `CancellationError` to the waiting task.
        func begin(_ continuation: CheckedContinuation<Answer, any Error>) -> Bool {
            let isCancelled = lock.withLock {
                if !hasEnded { self.continuation = continuation }
                return hasEnded
            }
            if isCancelled { continuation.resume(throwing: CancellationError()) }
            return !isCancelled
        }

        /// Passes the result to the waiting task. Only the first call has an effect.
        func end(_ result: Result<Answer, any Error>) {
            let waiting = lock.withLock {
                defer { (continuation, hasEnded) = (nil, true) }
                return continuation
            }
            waiting?.resume(with: result)
        }

        /// Performs the request, on a thread of its own. libcurl notices within a second that the exchange has ended.
        func perform() throws -> Answer {
            typealias Handle = Libcurl.Handle
            let make = try Libcurl.function("curl_easy_init", (@convention(c) () -> Handle?).self)
            let free = try Libcurl.function("curl_easy_cleanup", (@convention(c) (Handle) -> Void).self)
            let append = try Libcurl.function(
                "curl_slist_append", (@convention(c) (Libcurl.List?, UnsafePointer<CChar>) -> Libcurl.List?).self)
            let freeList = try Libcurl.function("curl_slist_free_all", (@convention(c) (Libcurl.List?) -> Void).self)
            let setNumber = try Libcurl.function(
                "curl_easy_setopt", (@convention(c) (Handle, Int32, Int) -> Int32).self)
            let setPointer = try Libcurl.function(
                "curl_easy_setopt", (@convention(c) (Handle, Int32, UnsafeRawPointer?) -> Int32).self)
            let perform = try Libcurl.function("curl_easy_perform", (@convention(c) (Handle) -> Int32).self)
            let reason = try Libcurl.function(
                "curl_easy_strerror", (@convention(c) (Int32) -> UnsafePointer<CChar>).self)
            guard let handle = make() else { throw Libcurl.missing }
            defer { free(handle) }
            var list: Libcurl.List?
            // Without the last entry, libcurl waits for the server's consent before a long body.
            let headers = (request.allHTTPHeaderFields ?? [:]).map { "\($0): \($1)" } + ["expect:"]
            for header in headers { list = append(list, header) ?? list }
            defer { freeList(list) }
            let me = UnsafeRawPointer(Unmanaged.passUnretained(self).toOpaque())
            let take: Libcurl.Take = { bytes, size, count, me in
                exchange(me).take(UnsafeBufferPointer(start: bytes, count: size * count))
            }
            let takeHeader: Libcurl.Take = { bytes, size, count, me in
                exchange(me).takeHeader(UnsafeBufferPointer(start: bytes, count: size * count))
            }
            let progress: Libcurl.Progress = { me, _, _, _, _ in exchange(me).isOver ? 1 : 0 }
            let numbers: [(Int32, Int)] = [
                (99, 1),  // CURLOPT_NOSIGNAL
                (181, 3),  // CURLOPT_PROTOCOLS: http and https
                (84, 2),  // CURLOPT_HTTP_VERSION: 1.1
                (155, Int(whole: 1000 * seconds)),  // CURLOPT_TIMEOUT_MS
                (78, 30), (20, 30),  // CURLOPT_CONNECTTIMEOUT, and CURLOPT_LOW_SPEED_TIME in seconds
                (19, 1),  // CURLOPT_LOW_SPEED_LIMIT in bytes a second
                (43, 0),  // CURLOPT_NOPROGRESS
                (47, 1),  // CURLOPT_POST
                (60, request.httpBody?.count ?? 0),  // CURLOPT_POSTFIELDSIZE
            ]
            for (option, value) in numbers { _ = setNumber(handle, option, value) }
            let pointers: [(Int32, UnsafeRawPointer?)] = [
                (10023, UnsafeRawPointer(list)),  // CURLOPT_HTTPHEADER
                (10001, me), (10029, me), (10057, me),  // CURLOPT_WRITEDATA, CURLOPT_HEADERDATA, CURLOPT_XFERINFODATA
                (20011, unsafeBitCast(take, to: UnsafeRawPointer.self)),  // CURLOPT_WRITEFUNCTION
                (20079, unsafeBitCast(takeHeader, to: UnsafeRawPointer.self)),  // CURLOPT_HEADERFUNCTION
                (20219, unsafeBitCast(progress, to: UnsafeRawPointer.self)),  // CURLOPT_XFERINFOFUNCTION
            ]
            for (option, value) in pointers { _ = setPointer(handle, option, value) }
            _ = (request.url?.absoluteString ?? "").withCString { setPointer(handle, 10002, $0) }  // CURLOPT_URL
            let code = (request.httpBody ?? Data()).withUnsafeBytes { body in
                _ = setPointer(handle, 10015, body.baseAddress)  // CURLOPT_POSTFIELDS
                return perform(handle)
            }
            if let early { return try early.get() }
            switch code {
            case 0: return (data, status)
            case 28: throw HTTPFailure.tooSlow  // CURLE_OPERATION_TIMEDOUT
            default: throw HTTPFailure.unreachable(String(cString: reason(code)))
            }
        }

        var isOver: Bool { lock.withLock { hasEnded } }

        /// Adds bytes of the body.
        ///
        /// - Returns: the number of bytes; 0 to end the response.
        func take(_ bytes: UnsafeBufferPointer<UInt8>) -> Int {
            guard early == nil, bytes.count <= most - data.count else {
                early = early ?? .failure(HTTPFailure.tooLong)
                return 0
            }
            data.append(bytes)
            return bytes.count
        }

        /// Takes a line of the header. Decides about the response after the last line.
        ///
        /// - Returns: the number of bytes; 0 to end the response.
        func takeHeader(_ bytes: UnsafeBufferPointer<UInt8>) -> Int {
            headerBytes += bytes.count
            guard headerBytes <= Self.mostHeaderBytes else {
                early = .failure(HTTPFailure.unreachable("its answer's header does not end"))
                return 0
            }
            let line = String(decoding: bytes, as: UTF8.self).trimmingCharacters(in: .whitespacesAndNewlines)
            if line.hasPrefix("HTTP/") {
                (fields, status) = ([:], line.split(separator: " ").dropFirst().first.flatMap { Int($0) } ?? 0)
            } else if let colon = line.firstIndex(of: ":") {
                let value = line[line.index(after: colon)...].trimmingCharacters(in: .whitespaces)
                fields[line[..<colon].lowercased()] = value
            } else if line.isEmpty, status >= 200 {
                decide()
            }
            return early == nil ? bytes.count : 0
        }

        private func decide() {
            let isCoded = ["content-encoding", "transfer-encoding"].contains {
                fields[$0].map { $0.lowercased() != "identity" } ?? false
            }
            guard !isCoded, let length = fields["content-length"].flatMap({ Int($0) }), length >= 0 else {
                // An error response without a length is accepted, but its body is not read.
                early = status >= 400 ? .success((Data(), status)) : .failure(HTTPFailure.unsaidLength)
                return
            }
            if length > most { early = .failure(HTTPFailure.tooLong) }
        }
    }

    private func exchange(_ pointer: UnsafeMutableRawPointer) -> CurlExchange {
        Unmanaged<CurlExchange>.fromOpaque(pointer).takeUnretainedValue()
    }
#endif
