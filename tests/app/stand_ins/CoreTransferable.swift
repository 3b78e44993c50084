// The part of CoreTransferable that the app uses.

import Foundation
import UniformTypeIdentifiers

// developer.apple.com/documentation/coretransferable/transferable, …/filerepresentation, …/datarepresentation
public protocol TransferRepresentation: Sendable { associatedtype Item: Transferable }
public protocol Transferable {
    associatedtype Representation: TransferRepresentation
    static var transferRepresentation: Representation { get }
}
public struct SentTransferredFile: Sendable { public init(_ file: URL, allowAccessingOriginalFile: Bool = false) {} }
public struct FileRepresentation<Item: Transferable>: TransferRepresentation {
    public init(
        exportedContentType: UTType, shouldAllowToOpenInPlace: Bool = false,
        exporting: @Sendable @escaping (Item) async throws -> SentTransferredFile
    ) {}
}
public struct DataRepresentation<Item: Transferable>: TransferRepresentation {
    public init(exportedContentType: UTType, exporting: @Sendable @escaping (Item) async throws -> Data) {}
}
extension TransferRepresentation {
    public func suggestedFileName(_ n: String) -> some TransferRepresentation { self }
    public func suggestedFileName(_ n: @Sendable @escaping (Item) -> String?) -> some TransferRepresentation { self }
}
