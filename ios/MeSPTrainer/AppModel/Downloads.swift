import Foundation
import MeSPCore
import MeSPDownload
import Observation

/// Bundles from the Hugging Face Hub: what one is before it is downloaded, and its download.
@MainActor @Observable public final class Downloads {
    /// The text that the person typed: `owner/name`.
    public var repository = ""
    /// The repository on the Hub under that name; nil until it was looked up.
    public private(set) var offer: BundleDownload.Offer?
    /// Whether the Hub is asked.
    public private(set) var isLooking = false
    /// The part that is there, from 0 to 1; nil while nothing is downloaded.
    public private(set) var progress: Double?

    @ObservationIgnored private let folder: DocumentsFolder
    @ObservationIgnored private let phone: any Phone
    @ObservationIgnored private let open: @Sendable (String) throws -> BundleDownload
    @ObservationIgnored private var work: Task<StoredBundle, any Error>?

    /// - Parameter open: the download of a repository.
    init(folder: DocumentsFolder, phone: any Phone, open: @escaping @Sendable (String) throws -> BundleDownload) {
        (self.folder, self.phone, self.open) = (folder, phone, open)
    }

    /// Looks up what is on the Hub.
    func look() async throws {
        guard !isLooking, progress == nil else { return }
        (offer, isLooking) = (nil, true)
        defer { isLooking = false }
        offer = try await open(repository.trimmingCharacters(in: .whitespaces)).offer()
    }

    /// The licence, as far as it is known.
    public var license: Sentence { offer?.manifest.model.license.map { "\($0)" } ?? "not named" }

    /// Whether such a bundle trains on this phone, in a sentence.
    public var fit: Sentence {
        guard let manifest = offer?.manifest else { return "" }
        if manifest.device == .gpu, let refusal = folder.gpuRefusal { return refusal }
        var settings = RunSettings(bundle: "", output: "")
        settings.seqLen = manifest.seqLens.min() ?? 1
        settings.rank = manifest.ranks.min() ?? 1
        do {
            let fit = try DeviceFit(settings, manifest, available: phone.availableMemory)
            let peak: Sentence = "Training on \(settings.seqLen) tokens takes \(fit.predictedPeak.megabytes)"
            guard let available = fit.available, !fit.fits else { return "\(peak): it fits this phone." }
            return "\(peak), and the phone would give \(available.megabytes): it does not fit."
        } catch {
            return error.plainSentence
        }
    }

    /// Downloads what was looked up, or continues with it. Until it has ended, or was stopped, it is a download that a later start of the
    /// app continues with.
    ///
    /// - Returns: the bundle; nil where it was stopped.
    func download() async throws -> StoredBundle? {
        guard progress == nil, let offer else { return nil }
        let download = try open(offer.repository)
        try folder.keep(offer)
        progress = 0
        defer {
            (progress, work) = (nil, nil)
            folder.forgetDownload()
        }
        let (bytes, sender) = AsyncStream.makeStream(of: Int.self, bufferingPolicy: .bufferingNewest(1))
        let folder = folder
        let work = Task.detached {
            defer { sender.finish() }
            return try await folder.download(offer, by: download) { sender.yield($0) }
        }
        self.work = work
        for await count in bytes { progress = Double(count) / Double(max(offer.size, 1)) }
        do {
            let bundle = try await work.value
            self.offer = nil
            return bundle
        } catch is CancellationError {
            return nil
        }
    }

    /// Goes on with the download that the app was ended in, where there is one.
    func goOn() async throws -> StoredBundle? {
        guard progress == nil, let begun = try folder.begunDownload() else { return nil }
        guard try !folder.hasEnded(open(begun.repository)) else {
            folder.forgetDownload()
            return nil
        }
        (offer, repository) = (begun, begun.repository)
        return try await download()
    }

    /// Ends the download. Received files stay, for the next time.
    public func stop() { work?.cancel() }
}
