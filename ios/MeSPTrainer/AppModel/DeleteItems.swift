import Foundation
import MeSP
import MeSPBundle
import MeSPCore
import MeSPSentences

extension AppModel {
    public enum Deletion {
        case bundle(StoredBundle)
        case run(StoredRun)
        case choice(Choice)
        case conversation
    }

    /// Whether the app asks to delete an item. Setting it to false closes the question without deleting anything.
    public var asksToDelete: Bool {
        get { deletion != nil }
        set { if !newValue { deletion = nil } }
    }

    public var deletionQuestion: Sentence {
        switch deletion {
        case .bundle(let bundle):
            let runs = library.runs.filter { !$0.isBenchmark && library.bundle(of: $0)?.id == bundle.id }.count
            let question: Sentence = "Delete \(bundle.name)? It takes \(bundle.size.megabytes)."
            return switch runs {
            case 0: question
            case 1: "\(question). A run needs it to resume or to generate text."
            default: "\(question). \(runs) runs need it to resume or to generate text."
            }
        case .run(let run): return "Delete \(run.name)? Its log and adapters cannot be recovered."
        case .choice: return "Delete this choice? It cannot be recovered."
        case .conversation: return "Begin a new conversation? This one is deleted."
        case nil: return ""
        }
    }

    /// Asks whether to delete an item. If the item is in use, reports a problem instead.
    public func askToDelete(_ wanted: Deletion) {
        switch wanted {
        case .bundle(let bundle) where bundle.id == bundleInUse:
            problem = "\(bundle.name) is in use; delete it when that has ended."
        case .run(let run) where run.status == .running || controller.isRunning && runFolder == run.id:
            problem = "\(run.name) is in progress; stop it first."
        default: deletion = wanted
        }
    }

    public func confirmDeletion() async {
        guard let confirmed = deletion else { return }
        deletion = nil
        askToDelete(confirmed)  // the item may be in use by now
        guard deletion != nil else { return }
        deletion = nil
        await attempt {
            switch confirmed {
            case .bundle(let bundle):
                examples.stop()
                chat.freeCaches()  // another bundle may get its name
                try library.folder.delete(bundle)
            case .run(let run):
                examples.stop()
                try library.folder.delete(run)
            case .choice(let choice): try choices.remove([choice.id])
            case .conversation: chat.clear()
            }
        }
        await refresh()
    }
}
