import MeSPAppModel
import Network

@MainActor final class SystemNetwork: NetworkPath {
    private(set) var isCostly = false
    var onChange: (() -> Void)?

    private let monitor = NWPathMonitor()

    init() {
        monitor.pathUpdateHandler = { @Sendable [weak self] path in
            let isCostly = path.isExpensive || path.isConstrained
            Task { @MainActor [weak self] in
                self?.isCostly = isCostly
                self?.onChange?()
            }
        }
        monitor.start(queue: .main)
    }
}
