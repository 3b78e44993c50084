import Foundation
import MeSP
import MeSPBundle
import Observation

@MainActor @Observable public final class ChoiceList {
    public private(set) var list = [Choice]()
    public var url: URL { store.url }

    @ObservationIgnored private let folder: DocumentsFolder
    private var store: ChoiceStore { folder.choices }

    init(_ folder: DocumentsFolder) { self.folder = folder }

    public func contains(_ answer: String, to message: String) -> Bool {
        list.contains { $0.chosen == answer && $0.prompt.last?.content == message }
    }

    func refresh() throws { list = try store.all().reversed() }

    /// Adds a choice. It replaces earlier choices for the same prompt that have the same two answers or the same rejected answer.
    func add(_ choice: Choice) throws {
        let answers = [choice.chosen, choice.rejected]
        try refresh()
        let former = list.filter {
            $0.prompt == choice.prompt
                && (answers.contains($0.rejected) && answers.contains($0.chosen) || $0.rejected == choice.rejected)
        }
        try store.append(choice, replacing: Set(former.map(\.id)))
        folder.applyPolicyToChoices()
        try refresh()
    }

    func remove(_ ids: Set<Choice.ID>) throws {
        try store.remove(ids)
        folder.applyPolicyToChoices()
        try refresh()
    }
}
