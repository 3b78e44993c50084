import Foundation

/// What an error is about.
public enum ErrorKind: Sendable, Equatable {
    /// A run or an answer is in progress.
    case busy
    /// Training takes at least `required` bytes of memory, and may take `available`.
    case insufficientMemory(required: Int, available: Int)
    /// The disk is full. `required` is the number of bytes that must be free; nil if it is unknown.
    case insufficientDisk(required: Int?)
    /// The model cannot be converted, for example because its family or its quantization is not supported.
    case unsupportedModel
    /// The processor or the device cannot train.
    case unsupportedDevice
    /// A conversation, a choice or a record of a file cannot be trained. `index` counts from 0.
    case invalidRecord(index: Int)
    /// An option with this name is out of range.
    case invalidOption(String)
    /// A file or folder is missing, damaged, or of another format.
    case damaged(URL)
    /// A run or adapters belong to other weights of the model.
    case otherWeights
    /// There are no saved adapters, or there is no run to continue.
    case nothingSaved
    /// A loss, a gradient or a parameter is not finite.
    case notFinite
    case other
}
