import Foundation
import MeSP

extension FineTuner {
    /// Opens a bundle with the tokenizer in it.
    ///
    /// - Parameters:
    ///   - bundle: the folder of the model.
    ///   - folder: the folder of the run. nil: one with the bundle's name in `MeSP` in the folder for application support.
    /// - Throws: `FineTuningError` where `bundle` is no bundle, is damaged, or has a tokenizer that cannot be read.
    public convenience init(bundle: URL, folder: URL? = nil) async throws {
        try await self.init(bundle: bundle, tokenizer: loadTokenizer(bundle: bundle), folder: folder)
    }
}
