import Foundation
import MeSPFiles
import MeSPSentences

extension SuperNode {
    /// Pulls a message if none is saved. Otherwise sends the answer to the saved message, and computes it first if necessary.
    func handleMessage(
        _ node: UInt64, _ report: (Event) -> Void, _ answer: (Question) async throws -> FlowerRecords
    ) async throws {
        try Task.checkCancellation()
        let pending = PendingMessage(folder: folder, mostBytes: mostBytes)
        guard let (metadata, tree) = try pending.message else {
            let pulled = try await persistently(report) { try await pull(node) }
            guard let message = try pulled.messages(2).first, let tree = try pulled.messages(3).first else {
                return try await Task.sleep(for: .seconds(seconds.poll))
            }
            // The server now considers the message delivered.
            do {
                return try pending.receive(
                    Metadata(message.messages(1).last ?? ProtobufMessage(Data())), FlowerObjectTree(tree))
            } catch let error as MeSPError {
                report(.passedOver(error.sentence))
                return try await Task.sleep(for: .seconds(seconds.poll))
            }
        }
        var question = Question(
            id: metadata.message, node: metadata.destination, type: metadata.type, run: metadata.run,
            group: metadata.group, created: Date(timeIntervalSince1970: metadata.created),
            folder: try pending.workFolder)
        let event: Event
        do {
            try checkTime(of: metadata)
            if try pending.reply == nil {
                var records: FlowerRecords?
                do {
                    try await receive(&question, metadata, tree, pending, node, report)
                    records = try await answer(question)
                } catch let error where !(error is CancellationError || error is Useless) {
                    report(.failed(question, error.localizedDescription))
                }
                try pending.answer(metadata, with: records)
            }
            event = .sent(question, bytes: try await send(pending, node, report))
        } catch let useless as Useless {
            event = .dropped(question, useless.why)
        }
        try pending.empty()
        report(event)
    }

    /// Pulls a message. The server considers a sent message delivered, so a cancelled task still waits up to one second for the response.
    private func pull(_ node: UInt64) async throws -> ProtobufMessage {
        let call = Task { try await api.call("pull-messages") { $0.add(1) { $0.add(1, node) } } }
        return try await withTaskCancellationHandler {
            try await call.value
        } onCancel: {
            DispatchQueue.global().asyncAfter(deadline: .now() + 1) { call.cancel() }
        }
    }

    private struct Useless: Error {
        let why: Sentence
    }

    private func checkTime(of metadata: Metadata) throws {
        if metadata.hasExpired { throw Useless(why: "The server no longer waits for this round.") }
    }

    /// Makes a call about a message. Repeats the call while the server is unreachable, until the message expires.
    @discardableResult
    private func call(
        _ name: String, for metadata: Metadata, _ node: UInt64, _ report: (Event) -> Void,
        _ write: (inout ProtobufWriter) -> Void
    ) async throws -> ProtobufMessage {
        do {
            return try await persistently(report) {
                try checkTime(of: metadata)
                return try await api.call(name) {
                    $0.add(1) { $0.add(1, node) }
                    write(&$0)
                }
            }
        } catch let refusal as FleetAPI.Refusal where refusal.code == FleetAPI.Refusal.runHasEnded {
            throw Useless(why: "The federation ended before the answer came.")
        }
    }

    private func receive(
        _ question: inout Question, _ metadata: Metadata, _ tree: FlowerObjectTree, _ pending: PendingMessage,
        _ node: UInt64, _ report: (Event) -> Void
    ) async throws {
        var isNew = false
        var bytes = try tree.ids.reduce(0) { $0 + (try pending.size($1) ?? 0) }
        try pending.check(tree, bytes: bytes)
        for id in tree.ids where try pending.size(id) == nil {
            isNew = true
            while true {
                let answer = try await call("pull-object", for: metadata, node, report) {
                    $0.add(2, metadata.run)
                    $0.add(3, id)
                }
                guard answer.number(1) != 0 else {
                    throw MeSPError("\(api.server.absoluteString) lacks a part of the message that it sent.")
                }
                if answer.number(2) != 0 {
                    let content = answer.bytes(3)
                    bytes += content.count
                    try pending.check(tree, bytes: bytes)
                    try pending.take(content, id: id)
                    break
                }
                try await Task.sleep(for: .seconds(1))
            }
        }
        if isNew {
            try await call("confirm-message-received", for: metadata, node, report) {
                $0.add(2, metadata.run)
                $0.add(3, tree.id)
            }
        }
        (question.records, bytes) = try pending.content(of: tree)
        if isNew { report(.received(question, bytes: bytes)) }
    }

    private func send(_ pending: PendingMessage, _ node: UInt64, _ report: (Event) -> Void) async throws -> Int {
        guard let (metadata, tree) = try pending.reply else { return 0 }
        let pushed = try await call("push-messages", for: metadata, node, report) { message in
            message.add(2) {
                $0.add(1) { metadata.write(to: &$0) }
                $0.add(2) { _ in }
            }
            message.add(3) { tree.write(to: &$0) }
            message.add(4, packed: [max(Date.now.timeIntervalSince1970 - metadata.created, 0.001)])
        }
        var bytes = 0
        let wanted = Set(pushed.texts(3))
        for id in tree.ids where wanted.contains(id) {
            let content = try pending.object(id)
            try await call("push-object", for: metadata, node, report) {
                $0.add(2, metadata.run)
                $0.add(3, id)
                $0.add(4, content)
                $0.add(5, pushed.text(4))
            }
            bytes += content.count
        }
        return bytes
    }
}
