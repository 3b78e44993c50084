/// Renders and masks records with a tokenizer. It keeps what the tokenizer and its chat template wrote, because records often share it.
struct RecordEncoder {
    let tokenizer: TrainedTokenizer
    let answersOnly: Bool
    var notices: DataNotices
    var plain: PlainEncoder
    var pieces = [Int: [UInt8]]()
    /// The renderings of marked conversations. Most conversations differ only in their texts and so share a rendering.
    var shapes = [Conversation: Rendering.Shape]()
    var knownEnds: TemplateEnds?
    /// The first image. The others must be of the same tower.
    var imageKind: ImageFeatures?

    init(tokenizer: any TextTokenizer, answersOnly: Bool = true, length: Int = 0) {
        (self.tokenizer, self.answersOnly) = (TrainedTokenizer(tokenizer), answersOnly)
        (notices, plain) = (DataNotices(length: length), PlainEncoder(self.tokenizer))
    }
}
