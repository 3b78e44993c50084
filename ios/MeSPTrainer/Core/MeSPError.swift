import MeSPSentences

/// Words for a person, in English and in the language of the app.
public typealias Sentence = MeSPSentences.Sentence

public typealias MeSPError = MeSPSentences.MeSPError
