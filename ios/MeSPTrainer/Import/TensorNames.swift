import Foundation

/// The names of tensors in checkpoints, and those that they have here, as in `mesp.models.tensor_names`.
enum TensorNames {
    /// The name of a checkpoint's tensor or module; nil where it takes no part in the training.
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

    /// Whether a tensor is a buffer that no model of the family computes with.
    static func changesNothing(_ name: String) -> Bool { PlainFamilies.buffers.contains(where: name.hasSuffix) }
}
