import MeSPBundle
import MeSPSentences

/// Words for a person, in English and in the language of the app.
public typealias Sentence = MeSPSentences.Sentence

public typealias MeSPError = MeSPSentences.MeSPError

/// Returns what `body` returns, and makes a sentence of its error. A failure of MLX stays what it is: such work may be done again.
func explaining<R>(_ body: () throws -> R, as sentence: (_ reason: Sentence) -> Sentence) throws -> R {
    do {
        return try body()
    } catch let failure as MLXFailure {
        throw failure
    } catch {
        throw MeSPError(sentence(error.plainSentence))
    }
}
