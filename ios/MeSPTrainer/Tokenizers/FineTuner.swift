import Foundation
import MeSP

extension FineTuner {
    /// Opens and checks the bundle at `bundle`, with the tokenizer in it.
    ///
    /// `folder` keeps the run: its log, its saved state and the adapters. Without one, that is a folder of the bundle's in Application Support.
    /// Throws an error that says what is wrong with the bundle or its tokenizer, and what to do.
    public convenience init(bundle: URL, folder: URL? = nil) async throws {
        try await self.init(bundle: bundle, tokenizer: loadTokenizer(bundle: bundle), folder: folder)
    }
}
