import Foundation

enum TensorNames {
    /// Returns MeSP's name for a checkpoint's tensor or module; nil if training does not use it.
    static func here(_ name: String, _ family: PlainFamily) -> String? {
        if PlainFamilies.unused.contains(where: name.hasPrefix) || PlainFamilies.limits.contains(where: name.hasSuffix)
        {
            return nil
        }
        var name = name
        if !family.texts.isEmpty, let (prefix, ours) = PlainFamilies.text.first(where: { name.hasPrefix($0.key) }) {
            name = ours + name.dropFirst(prefix.count)
        }
        if PlainFamilies.headless.contains(where: name.hasPrefix) { name = "model.\(name)" }
        for (ours, theirs) in family.names {
            let renamed = ".\(name).".replacingOccurrences(of: ".\(theirs).", with: ".\(ours).")
            name = renamed.trimmingCharacters(in: CharacterSet(charactersIn: "."))
        }
        return name
    }
}
