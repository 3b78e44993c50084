import Foundation
import MeSPBundle
import Observation

/// The choices that a person has made between answers: what a run can learn next.
@MainActor @Observable public final class Choices {
    /// The newest first.
    public private(set) var list = [Choice]()
    /// The file that holds them, to share.
    public var url: URL { store.url }

    @ObservationIgnored private let folder: DocumentsFolder
    private var store: ChoiceStore { folder.choices }

    init(_ folder: DocumentsFolder) { self.folder = folder }

    /// Whether an answer was taken to a message.
    public func holds(_ answer: String, to message: String) -> Bool {
        list.contains { $0.chosen == answer && $0.prompt.last?.content == message }
    }

    func refresh() throws { list = try store.all().reversed() }

    /// Keeps a choice, in place of one of the same answers or of the first of them with another correction.
    func keep(_ choice: Choice) throws {
        let answers = [choice.chosen, choice.rejected]
        try refresh()
        let former = list.filter {
            $0.prompt == choice.prompt
                && (answers.contains($0.rejected) && answers.contains($0.chosen) || $0.rejected == choice.rejected)
        }
        try store.append(choice, replacing: Set(former.map(\.id)))
        folder.keepChoices()
        try refresh()
    }

    func remove(_ ids: Set<Choice.ID>) throws {
        try store.remove(ids)
        folder.keepChoices()
        try refresh()
    }
}
