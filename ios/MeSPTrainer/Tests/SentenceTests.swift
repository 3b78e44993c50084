import Foundation
import MeSPSentences
import Testing

@testable import MeSPCore

@Suite struct SentenceTests {
    private func translated(_ table: [String: String]) throws -> Bundle {
        let folder = temporaryFolder().appendingPathComponent("en.lproj")
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        try PropertyListSerialization.data(fromPropertyList: table, format: .binary, options: 0)
            .write(to: folder.appendingPathComponent("Sentences.strings"))
        return try #require(Bundle(path: folder.deletingLastPathComponent().path))
    }

    @Test func withoutATranslationItIsEnglish() {
        let (name, size) = ("a.txt", 1.5)
        let sentence: Sentence = "\(name) has \(3) tokens, \(UInt32(20))% of \([64, 128]) and \(size)."
        #expect(sentence.english == "a.txt has 3 tokens, 20% of [64, 128] and 1.5.")
        #expect(sentence.localized == sentence.english)
        #expect(("Below 20%." as Sentence).localized == "Below 20%.")
        #expect(MeSPError("\(name) is empty.").localizedDescription == "a.txt is empty.")
    }

    @Test func aTranslationPutsTheValuesWhereItWants() throws {
        let bundle = try translated([
            "%@ has %lld of %@": "Von %3$@ hat %1$@ %2$lld", "The text": "Der Text", "%@: %lld%%": "%2$lld %% (%1$@)",
            "Below 20%.": "Unter 20 %.",
        ])
        let text: Sentence = "The text"
        let sentence: Sentence = "\(text) has \(7) of \("100%@")"
        #expect(sentence.localized(by: bundle) == "Von 100%@ hat Der Text 7")
        #expect(sentence.english == "The text has 7 of 100%@")
        #expect(("\("x"): \(5)%" as Sentence).localized(by: bundle) == "5 % (x)")
        #expect(("Below 20%." as Sentence).localized(by: bundle) == "Unter 20 %.")
    }

    @Test func aFederationsErrorIsTranslatedToo() throws {
        let bundle = try translated(["%@ no longer knows this node; join again.": "%@ kennt diesen Knoten nicht mehr."])
        let error: any Error = MeSPError("\("a.org") no longer knows this node; join again.")
        #expect(error.plainSentence.localized(by: bundle) == "a.org kennt diesen Knoten nicht mehr.")
    }

    @Test func aSentenceInAnotherLosesItsFullStop() throws {
        let bundle = try translated(["It broke.": "Es ist kaputt.", "No: %@; try again.": "Nein: %@; noch einmal."])
        let whole: Sentence = "No: \(MeSPError("It broke.").plainSentence); try again."
        #expect(whole.english == "No: It broke; try again.")
        #expect(whole.localized(by: bundle) == "Nein: Es ist kaputt; noch einmal.")
    }

    @Test func inAFileItIsEnglish() throws {
        let bundle = try translated(["Training continues.": "Es geht weiter.", "after step %lld": "nach Schritt %lld"])
        let json = try JSONEncoder().encode(["Training continues.", "after step \(7)"] as [Sentence])
        #expect(String(decoding: json, as: UTF8.self) == #"["Training continues.","after step 7"]"#)
        let read = try JSONDecoder().decode([Sentence].self, from: json)
        #expect(read == ["Training continues.", "after step 7"])
        #expect(read.map { $0.localized(by: bundle) } == ["Es geht weiter.", "after step 7"])
    }
}
