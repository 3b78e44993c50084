import Foundation
import MLX
import MeSPBundle
import MeSPSentences

/// What a model's vision tower made of an image, for a message of the person.
///
/// The tower is not trained, so an app computes the features of an image once. A run stores equal rows once. Memory and disk hold the rows of all images.
public struct ImageFeatures: Sendable, Hashable {
    /// The text that takes the place of one image token in the chat template, as the model's processor writes it, such as
    /// `<fake_token_around_image><global-img><image>…<fake_token_around_image>`. It has ``token`` ``count`` times.
    public let text: String
    /// The image token.
    public let token: String
    /// The number of rows. Each takes the place of the embedding of one image token.
    public let count: Int
    let rows: Data
    let dtype: ElementType

    /// An image in a conversation whose rendering does not depend on the features.
    static let any = ImageFeatures(text: "", token: "", count: 0, rows: Data(), dtype: .float32)

    /// The bytes of a row.
    var width: Int { rows.count / count }
}

extension ImageFeatures {
    /// Creates the features of an image. Evaluates the rows and copies them, so call it where the app may use MLX: within
    /// ``FineTuner/whilePaused(isolation:_:)``, or while no run is in progress.
    ///
    /// - Parameters:
    ///   - text: the text of the image, which has `token` as often as there are rows.
    ///   - rows: what takes the place of the image tokens' embeddings: `[n, hidden]` or `[tiles, n, hidden]`, in float16, bfloat16 or float32.
    ///   - token: the image token of the model.
    /// - Throws: ``FineTuningError`` if `rows` has another shape or type, or cannot be computed.
    public init(text: String, rows: MLXArray, token: String = "<image>") throws {
        let dtype = [ElementType.float16, .bfloat16, .float32].first { $0.dtype == rows.dtype }
        guard let dtype, rows.ndim > 1, rows.size > 0 else {
            throw FineTuningError("The rows of an image are a matrix of float16, bfloat16 or float32; pass such rows.")
        }
        let bytes = try FineTuningError.describing {
            try MLXErrors.collect { try rows.withBytes { bytes in bytes.withUnsafeBytes { Data($0) } } }
        }
        self.init(text: text, token: token, count: rows.size / rows.dim(-1), rows: bytes, dtype: dtype)
    }
}

extension [Conversation.Message] {
    func checkAreText() throws {
        guard allSatisfy(\.images.isEmpty) else {
            throw FineTuningError(
                "Only training on conversations takes images, and no choice, answer or file does; leave them out.")
        }
    }
}

extension RecordEncoder {
    /// Puts the tokens of images in place of their image tokens. They are never in the loss.
    ///
    /// - Throws: `MeSPError` if there are not as many image tokens as images, or if the images are not of one tower.
    mutating func put(_ images: [ImageFeatures], into encoded: Encoded) throws -> Encoded {
        guard let first = images.first else { return encoded }
        let kind = imageKind ?? first
        imageKind = kind
        guard images.allSatisfy({ ($0.token, $0.dtype, $0.width) == (kind.token, kind.dtype, kind.width) }) else {
            throw MeSPError("its images and those before have unlike rows; take all from the model's vision tower.")
        }
        func ids(_ text: String) -> [UInt32] {
            tokenizer.encode(text, addsSpecialTokens: false).map { UInt32($0) }
        }
        let token = ids(kind.token)
        let count = encoded.tokens.count { [$0] == token }
        guard count == images.count else {
            throw MeSPError(
                "it has \(images.count) images, and \(count) times \(kind.token) in the chat template; take a model whose template has images, and write the token nowhere."
            )
        }
        var (result, rest) = (Encoded(tokens: [], counted: [], images: images), images.makeIterator())
        for (id, isCounted) in zip(encoded.tokens, encoded.counted) {
            let image = [id] == token ? rest.next() : nil
            let own = image.map { ids($0.text) } ?? [id]
            let isRow = own.map { image != nil && [$0] == token }
            if let image, case let written = isRow.count(where: { $0 }), written != image.count {
                throw MeSPError(
                    "it has an image with \(image.count) rows and \(written) times \(kind.token) in its text; take the text that the model's processor writes."
                )
            }
            result.tokens += own
            result.counted += own.map { _ in image == nil && isCounted }
            result.isRow += isRow
        }
        return result
    }
}
