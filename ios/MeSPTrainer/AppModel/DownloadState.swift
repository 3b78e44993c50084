import Foundation
import MeSPControl
import MeSPCore
import MeSPDownload
import MeSPSentences
import Observation

/// The network that the device uses now: in the app the system's.
@MainActor public protocol NetworkPath: AnyObject {
    /// Whether it costs extra, as most mobile networks do, or is in Low Data Mode.
    var isCostly: Bool { get }
    /// To be called when that may have changed.
    var onChange: (() -> Void)? { get set }
}

/// A bundle or a model of the Hugging Face Hub as the app shows it: what it is before it is downloaded, how far its download is, and how
/// far a model is rewritten.
@MainActor @Observable public final class DownloadState {
    /// The text that the person typed: `owner/name`.
    public var repository = ""
    /// The repository on the Hub under that name; nil until it was looked up.
    public private(set) var offer: HubDownload.Offer?
    /// Whether the Hub is asked.
    public private(set) var isLooking = false
    /// The part of the files, or of the bundle that a model is rewritten into, that is there, from 0 to 1; nil while nothing is downloaded.
    public private(set) var progress: Double?
    /// Whether the files are there, and the model is rewritten.
    public private(set) var isRewriting = false
    /// The notices about the model that was rewritten last.
    public private(set) var notices = [Sentence]()

    /// Whether the network costs extra or is in Low Data Mode; false where it is not known.
    private var isCostly = false
    /// Whether the person wants the download over such a network too.
    private var usesAnyNetwork = false
    /// Whether the download was asked for and has not begun.
    private var waitsForAnswer = false
    /// The size of what is not there yet, in bytes.
    private var missing = 0

    @ObservationIgnored private let folder: DocumentsFolder
    @ObservationIgnored private let monitor: any DeviceMonitor
    @ObservationIgnored private let network: (any NetworkPath)?
    @ObservationIgnored private let open: @Sendable (String) throws -> HubDownload
    @ObservationIgnored private var work: Task<(bundle: StoredBundle, notices: [Sentence]), any Error>?
    /// Whether the person has stopped the download in progress.
    @ObservationIgnored private var isStopped = false

    /// The size in bytes from which on the person is asked.
    @ObservationIgnored var askedFrom = 50_000_000

    /// - Parameters:
    ///   - network: nil where it is not known.
    ///   - open: the download of a repository.
    init(
        folder: DocumentsFolder, monitor: any DeviceMonitor, network: (any NetworkPath)?,
        open: @escaping @Sendable (String) throws -> HubDownload
    ) {
        (self.folder, self.monitor, self.network, self.open) = (folder, monitor, network, open)
        network?.onChange = { [weak self] in self?.readNetwork() }
        readNetwork()
    }

    private func readNetwork() { isCostly = network?.isCostly == true }

    /// The question whether so much may come over this network; nil where there is none. A download in progress waits for another
    /// network.
    public var networkQuestion: Sentence? {
        guard isCostly, !usesAnyNetwork, !isRewriting, progress != nil || waitsForAnswer && missing >= askedFrom else {
            return nil
        }
        return
            "This network costs extra or is in Low Data Mode, and the download takes \(missing.megabytes) more. Connect to another network, or download now."
    }

    /// Looks up what is on the Hub.
    func lookUp() async throws {
        guard !isLooking, progress == nil else { return }
        (offer, notices, isLooking, waitsForAnswer, usesAnyNetwork) = (nil, [], true, false, false)
        defer { isLooking = false }
        offer = try await open(repository.trimmingCharacters(in: .whitespaces)).fetchOffer(for: folder.importDevice)
    }

    /// The space that the offer takes while it is rewritten, in bytes: its files and the bundle are there at once. nil of a bundle.
    public var spaceWhileRewriting: Int? { offer.flatMap { $0.isModel ? $0.size + $0.bundleSize : nil } }

    /// The licence, as far as it is known.
    public var license: Sentence {
        guard let model = offer?.manifest.model else { return "not named" }
        return Self.license(model.license, name: model.licenseName)
    }

    /// A licence by its name where it has one, or by the Hub's identifier.
    static func license(_ identifier: String?, name: String?) -> Sentence {
        [name, identifier].compactMap { $0 }.first { !$0.isEmpty }.map { "\($0)" } ?? "not named"
    }

    /// Whether such a bundle trains on this phone, in a sentence.
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

    /// Downloads what was looked up and rewrites a model, or continues with it, unless `networkQuestion` is to be answered first. Until it has ended, or was
    /// stopped, it is a download that a later start of the app continues with.
    ///
    /// - Returns: the bundle; nil where it was stopped, or waits for an answer.
    func download() async throws -> StoredBundle? {
        guard progress == nil, let offer else { return nil }
        waitsForAnswer = true
        missing = folder.missing(offer, of: try open(offer.repository))
        return networkQuestion == nil ? try await begin(offer) : nil
    }

    /// Downloads over any network, as the person has decided. A download in progress then continues over it.
    ///
    /// - Returns: as `download()`; nil where a download is in progress, whose caller gets the bundle.
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

    /// Resumes the download during which the app was ended, where there is one.
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

    /// Ends the download or the rewriting. The next one continues with the files that are there.
    public func stop() {
        isStopped = true
        work?.cancel()
    }
}
