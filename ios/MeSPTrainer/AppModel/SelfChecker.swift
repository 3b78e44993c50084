import Foundation
import MeSPControl
import MeSPCore
import MeSPSelfCheck
import MeSPSentences
import Observation

/// A self-check of this device, whose report grows as its checks end, on the screen and in a file. While the app is not in front, it
/// waits.
@MainActor @Observable public final class SelfChecker {
    /// The findings of the present or last self-check so far.
    public private(set) var report: SelfCheckReport?
    public private(set) var isRunning = false
    /// Why it ended early, in a sentence.
    public private(set) var problem: Sentence?

    /// The check that runs now.
    public var current: String? {
        guard isRunning, let report, report.checks.count < report.start.names.count else { return nil }
        return report.start.names[report.checks.count]
    }

    @ObservationIgnored private let monitor: any DeviceMonitor
    @ObservationIgnored private var gate = BoundaryGate()

    public init(monitor: any DeviceMonitor) {
        self.monitor = monitor
        monitor.observers.append { [weak self] _ in self?.update() }
    }

    /// Begins a self-check. Does nothing while another is in progress.
    ///
    /// - Parameter file: gets the report, again after each check: what a check that ends the app leaves names it.
    public func start(_ settings: SelfCheck.Settings, file: URL) {
        guard !isRunning else { return }
        (report, problem, isRunning) = (nil, nil, true)
        let gate = BoundaryGate()
        self.gate = gate
        update()
        let reports = gate.start("self-check", sending: SelfCheckReport.self) { send in
            var report: SelfCheckReport?
            try SelfCheck(settings).run(atBlock: { try gate.pass { _ in } }) { record in
                switch record {
                case .start(let start): report = SelfCheckReport(start)
                case .check(let check): report?.checks.append(check)
                case .end(let end): report?.end = end
                }
                if let report {
                    try report.write(to: file)
                    send(report)
                }
            }
        }
        Task {
            do {
                for try await report in reports { self.report = report }
            } catch is CancellationError {
                problem = "The self-check was stopped."
            } catch {
                problem = error.plainSentence
            }
            isRunning = false
        }
    }

    /// Ends it at the next block.
    public func stop() { gate.stop() }

    private func update() { gate.pauseUnlessInFront(monitor) }
}

extension SelfCheckReport {
    fileprivate func write(to file: URL) throws {
        do {
            try FileManager.default.createDirectory(
                at: file.deletingLastPathComponent(), withIntermediateDirectories: true)
            try json.write(to: file, options: .atomic)
        } catch {
            throw MeSPError("Cannot write \(file.lastPathComponent): \(error.plainSentence).")
        }
    }
}
