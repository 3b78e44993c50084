import Foundation
import MeSPControl
import MeSPCore
import MeSPDownload
import MeSPSentences
import Observation

/// The network that the device uses now.
@MainActor public protocol NetworkPath: AnyObject {
    /// Whether the network costs extra, as most mobile networks do, or is in Low Data Mode.
    var isCostly: Bool { get }
    /// A closure to call when `isCostly` may have changed.
    var onChange: (() -> Void)? { get set }
}

/// A bundle or a model on the Hugging Face Hub, as the app shows it: its description before the download, then the progress of downloading and
/// rewriting.
@MainActor @Observable public final class DownloadState {
    /// The text that the person typed: `owner/name`.
    public var repository = ""
    /// The bundle or the model in that repository; nil until it was looked up.
    public private(set) var offer: HubDownload.Offer?
    /// Whether a request to the Hub is in progress.
    public private(set) var isLooking = false
    /// The fraction of the files that is downloaded, or of the bundle that is written, from 0 to 1; nil while no download is in progress.
    public private(set) var progress: Double?
    /// Whether the files are downloaded and the model is being rewritten.
    public private(set) var isRewriting = false
    /// The notices about the model that was rewritten last.
    public private(set) var notices = [Sentence]()

    /// Whether the network costs extra or is in Low Data Mode; false if the network is unknown.
    private var isCostly = false
    /// Whether the person allows a network that costs extra or is in Low Data Mode.
    private var usesAnyNetwork = false
    /// Whether the person has asked for the download and it has not begun.
    private var waitsForAnswer = false
    /// The bytes that are not downloaded yet.
    private var missing = 0

    @ObservationIgnored private let folder: DocumentsFolder
    @ObservationIgnored private let monitor: any DeviceMonitor
    @ObservationIgnored private let network: (any NetworkPath)?
    @ObservationIgnored private let open: @Sendable (String) throws -> HubDownload
    @ObservationIgnored private var work: Task<(bundle: StoredBundle, notices: [Sentence]), any Error>?
    /// Whether the person has stopped the download in progress.
    @ObservationIgnored private var isStopped = false

    /// The size in bytes from which the app asks the person before it downloads over a network that costs extra or is in Low Data Mode.
    @ObservationIgnored var askedFrom = 50_000_000

    /// - Parameters:
    ///   - network: the network; nil if it is unknown.
    ///   - open: a function that opens the download of a repository.
    init(
        folder: DocumentsFolder, monitor: any DeviceMonitor, network: (any NetworkPath)?,
        open: @escaping @Sendable (String) throws -> HubDownload
    ) {
        (self.folder, self.monitor, self.network, self.open) = (folder, monitor, network, open)
        network?.onChange = { [weak self] in self?.readNetwork() }
        readNetwork()
    }

    private func readNetwork() { isCostly = network?.isCostly == true }

    /// The question whether the download may use this network; nil if nothing has to be asked. Until the person answers, a download in progress waits
    /// for another network.
    public var networkQuestion: Sentence? {
        guard isCostly, !usesAnyNetwork, !isRewriting, progress != nil || waitsForAnswer && missing >= askedFrom else {
            return nil
        }
        return
            "This network costs extra or is in Low Data Mode, and the download takes \(missing.megabytes) more. Connect to another network, or download now."
    }

    /// Looks up the repository on the Hub.
    func lookUp() async throws {
        guard !isLooking, progress == nil else { return }
        (offer, notices, isLooking, waitsForAnswer, usesAnyNetwork) = (nil, [], true, false, false)
        defer { isLooking = false }
        offer = try await open(repository.trimmingCharacters(in: .whitespaces)).fetchOffer(for: folder.importDevice)
    }

    /// The space in bytes that a model's files and its bundle take together while the model is rewritten; nil without an offer, or if the offer is a
    /// bundle.
    public var spaceWhileRewriting: Int? { offer.flatMap { $0.isModel ? $0.size + $0.bundleSize : nil } }

    /// The name of the licence, or “not named”.
    public var license: Sentence {
        guard let model = offer?.manifest.model else { return "not named" }
        return Self.license(model.license, name: model.licenseName)
    }

    /// Returns the name of a licence, or else the Hub's identifier.
    static func license(_ identifier: String?, name: String?) -> Sentence {
        [name, identifier].compactMap { $0 }.first { !$0.isEmpty }.map { "\($0)" } ?? "not named"
    }

    /// A sentence that says whether the bundle of the offer trains on this phone.
    public var fit: Sentence {
        guard let manifest = offer?.manifest else { return "" }
        if manifest.device == .gpu, let refusal = folder.gpuRefusal { return refusal }
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

    /// Downloads the offer, or continues an earlier download, and then rewrites a model into a bundle. Does nothing if `networkQuestion` must be
    /// answered first. A later launch of the app resumes the download unless it has ended or was stopped.
    ///
    /// - Returns: the bundle; nil if the download was stopped or waits for an answer.
    func download() async throws -> StoredBundle? {
        guard progress == nil, let offer else { return nil }
        waitsForAnswer = true
        missing = folder.missing(offer, of: try open(offer.repository))
        return networkQuestion == nil ? try await begin(offer) : nil
    }

    /// Allows any network, as the person has decided, and begins the download or continues the one in progress.
    ///
    /// - Returns: the result of `download()`; nil if a download is in progress, because the caller of that download gets the bundle.
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

    /// Resumes the download that was in progress when the app was terminated. Returns its bundle; nil if there is no such download, or if it had
    /// ended already or is stopped.
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

    /// Stops the download or the rewriting. The next download continues with the files that exist.
    public func stop() {
        isStopped = true
        work?.cancel()
    }
}
