#if canImport(os)
    import os

    private let signposter = OSSignposter(subsystem: "MeSP", category: "run")
    private let logger = Logger(subsystem: "MeSP", category: "run")
#endif

/// What a run does, for Instruments and Console on Apple's systems.
struct RunTrace {
    private var name = ""
    #if canImport(os)
        private var interval: OSSignpostIntervalState?
    #endif

    mutating func enter(_ name: String) {
        guard name != self.name else { return }
        self.name = name
        #if canImport(os)
            if let interval { signposter.endInterval("phase", interval) }
            interval = signposter.beginInterval("phase", "\(name, privacy: .public)")
            logger.info("\(name, privacy: .public)")
        #endif
    }
}
