import Foundation
import MeSPControl
import MeSPCore
import MeSPDownload
import MeSPSentences
import Observation

@MainActor public protocol NetworkPath: AnyObject {
    /// Whether the network is expensive, as most mobile networks are, or in Low Data Mode.
    var isCostly: Bool { get }
    var onChange: (() -> Void)? { get set }
}

@MainActor @Observable public final class DownloadState {
    public var repository = ""
    public private(set) var offer: HubDownload.Offer?
    public private(set) var isLooking = false
    /// The fraction of the download, or of the conversion after it, from 0 to 1. It is nil while neither is in progress.
    public private(set) var progress: Double?
    public private(set) var isRewriting = false
    public private(set) var notices = [Sentence]()

    private var isCostly = false
    private var usesAnyNetwork = false
    private var waitsForAnswer = false
    private var missing = 0

    @ObservationIgnored private let folder: DocumentsFolder
    @ObservationIgnored private let monitor: any DeviceMonitor
    @ObservationIgnored private let network: (any NetworkPath)?
    @ObservationIgnored private let open: @Sendable (String) throws -> HubDownload
    @ObservationIgnored private var work: Task<(bundle: StoredBundle, notices: [Sentence]), any Error>?
    @ObservationIgnored private var isStopped = false

    /// The smallest remaining download, in bytes, for which the app asks before it uses an expensive network or Low Data Mode.
    @ObservationIgnored var askedFrom = 50_000_000

    init(
        folder: DocumentsFolder, monitor: any DeviceMonitor, network: (any NetworkPath)?,
        open: @escaping @Sendable (String) throws -> HubDownload
    ) {
        (self.folder, self.monitor, self.network, self.open) = (folder, monitor, network, open)
        network?.onChange = { [weak self] in self?.readNetwork() }
        readNetwork()
    }

    private func readNetwork() { isCostly = network?.isCostly == true }

    /// The question whether the download may use this network, or nil if no answer is needed. A download in progress waits for another network.
    public var networkQuestion: Sentence? {
        guard isCostly, !usesAnyNetwork, !isRewriting, progress != nil || waitsForAnswer && missing >= askedFrom else {
            return nil
        }
        return
            "This network costs extra or is in Low Data Mode, and the download takes \(missing.megabytes) more. Connect to another network, or download now."
    }

    func lookUp() async throws {
        guard !isLooking, progress == nil else { return }
        (offer, notices, isLooking, waitsForAnswer, usesAnyNetwork) = (nil, [], true, false, false)
        defer { isLooking = false }
        offer = try await open(repository.trimmingCharacters(in: .whitespaces)).fetchOffer()
    }

    public var spaceWhileRewriting: Int? { offer.flatMap { $0.isModel ? $0.size + $0.bundleSize : nil } }

    public var license: Sentence {
        guard let model = offer?.manifest.model else { return "not named" }
        return Self.license(model.license, name: model.licenseName)
    }

    static func license(_ identifier: String?, name: String?) -> Sentence {
        [name, identifier].compactMap { $0 }.first { !$0.isEmpty }.map { "\($0)" } ?? "not named"
    }

    public var fit: Sentence {
        guard let manifest = offer?.manifest else { return "" }
        var settings = RunSettings(bundle: "", output: "")
        settings.seqLen = manifest.seqLens.min() ?? 1
        settings.rank = manifest.ranks.min() ?? 1
        do {
            let fit = try MemoryFit(settings, manifest, available: monitor.availableMemory)
            let peak: Sentence = "Training on \(settings.seqLen) tokens takes \(fit.predictedPeak.megabytes)"
            guard let available = fit.available, !fit.fits else { return "\(peak): it fits this phone." }
            return "\(peak), and the phone would give \(available.megabytes): it does not fit."
        } catch {
            return error.plainSentence
        }
    }

    /// Downloads the offer, or continues an earlier download, and converts a model into a bundle. Downloads nothing while `networkQuestion` needs an
    /// answer.
    func download() async throws -> StoredBundle? {
        guard progress == nil, let offer else { return nil }
        waitsForAnswer = true
        missing = folder.missing(offer, of: try open(offer.repository))
        return networkQuestion == nil ? try await begin(offer) : nil
    }

    /// Allows any network, and begins or continues the download.
    ///
    /// - Returns: the bundle, or nil if the download was not completed. Returns nil at once if a download is in progress. The caller that began it
    ///   gets the bundle.
    func downloadNow() async throws -> StoredBundle? {
        usesAnyNetwork = true
        guard let work else { return try await download() }
        work.cancel()
        return nil
    }

    private func begin(_ offer: HubDownload.Offer) async throws -> StoredBundle? {
        (waitsForAnswer, isStopped, progress) = (false, false, 0)
        defer {
            (progress, isRewriting, work) = (nil, false, nil)
            folder.forgetDownload()
        }
        if missing < askedFrom { usesAnyNetwork = true }
        while true {
            let usesAny = usesAnyNetwork
            do {
                return try await fetch(offer, usesAnyNetwork: usesAny)
            } catch is CancellationError {
                guard usesAnyNetwork, !usesAny, !isStopped else { return nil }
            }
        }
    }

    private func fetch(_ offer: HubDownload.Offer, usesAnyNetwork: Bool) async throws -> StoredBundle {
        let (download, folder) = (try open(offer.repository), folder)
        try folder.save(.init(offer: offer, usesAnyNetwork: usesAnyNetwork))
        let (bytes, sender) = AsyncStream.makeStream(
            of: DocumentsFolder.DownloadProgress.self, bufferingPolicy: .bufferingNewest(1))
        let work = Task.detached {
            defer { sender.finish() }
            return try await folder.download(offer, by: download, usesAnyNetwork: usesAnyNetwork) { sender.yield($0) }
        }
        self.work = work
        for await step in bytes {
            switch step {
            case .downloaded(let count):
                progress = Double(count) / Double(max(offer.size, 1))
                missing = offer.size - count
            case .rewritten(let count):
                isRewriting = true
                progress = min(1, Double(count) / Double(max(offer.bundleSize, 1)))
            }
        }
        let bundle: StoredBundle
        (bundle, notices) = try await work.value
        self.offer = nil
        return bundle
    }

    func resume() async throws -> StoredBundle? {
        guard progress == nil, let begun = try folder.readBegunDownload() else { return nil }
        let download = try open(begun.offer.repository)
        guard !folder.hasEnded(download) else {
            folder.forgetDownload()
            folder.removeRest(of: download)
            return nil
        }
        (offer, repository, usesAnyNetwork) = (begun.offer, begun.offer.repository, begun.usesAnyNetwork)
        missing = folder.missing(begun.offer, of: download)
        return try await begin(begun.offer)
    }

    /// Stops the download or the conversion. A later download of the same offer reuses the downloaded files.
    public func stop() {
        isStopped = true
        work?.cancel()
    }
}
