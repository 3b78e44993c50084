@testable import MeSPBundle

#if os(Linux)
    import Foundation
    import Glibc
    import Testing

    @testable import MeSPAppModel
    @testable import MeSPCore
    @testable import MeSPDownload

    /// Tests downloads with a fault at a randomly chosen call that changes a file.
    @Suite(.serialized) @MainActor final class DownloadFaultsTests: AppSuite {
        private nonisolated static let environment = ProcessInfo.processInfo.environment
        private var folder: URL { documents }

        enum Kind: String, CaseIterable { case full, crash, power }

        @Test(arguments: Kind.allCases, [false, true])
        func aDownloadGoesOnFromWhicheverCallFailed(_ kind: Kind, isModel: Bool) async throws {
            var source = try tiedBundle()
            if isModel {
                source = folder.appendingPathComponent("model")
                try TinyModel.write(to: source)
            }
            let hub = try Hub(source)
            defer { _ = hub.end() }

            let library = folder.appendingPathComponent("faults.so")
            try compile(into: library)
            let count = folder.appendingPathComponent("count")
            let whole = folder.appendingPathComponent("whole")
            #expect(try download(hub, into: whole, library, ["FAULTS_COUNT": count.path]) == .said(""))
            let calls = try #require(Int(String(contentsOf: count, encoding: .utf8)))
            var random = FuzzTests.Generator(state: UInt64(kind.rawValue.utf8.count))
            var failed = 0
            for number in (1...calls).shuffled(using: &random).prefix(6) {
                let documents = folder.appendingPathComponent("\(kind.rawValue)-\(number)")
                let faults = ["FAULTS_KIND": kind.rawValue, "FAULTS_AT": "\(number)"]
                switch try download(hub, into: documents, library, faults) {
                case .killed: failed += kind == .full ? 0 : 1
                case .said(let problem):
                    failed += problem == "" ? 0 : 1
                    #expect(problem == "" || kind == .full && problem.contains("space"), "call \(number): \(problem)")
                }
                for bundle in try bundles(documents) { _ = try ModelBundle(url: bundle) }
                let next = try download(hub, into: documents, library)
                #expect(next == .said(""), "call \(number)")
                #expect(try bundles(documents).map { try ModelBundle(url: $0).url.lastPathComponent } == ["tied.mesp"])
                let rest = try FileManager.default.subpathsOfDirectory(atPath: documents.path)
                #expect(rest.filter { $0.hasPrefix(".") || $0.contains(".part") } == [], "call \(number)")
            }
            #expect(failed >= 4)
        }

        @Test(.enabled(if: environment["MESP_DOWNLOAD_INTO"] != nil, "another test starts it"))
        func goesOnWithTheDownload() async throws {
            let hub = try #require(Self.environment["MESP_HUB"].flatMap { URL(string: $0) })
            let documents = try #require(Self.environment["MESP_DOWNLOAD_INTO"].map { URL(fileURLWithPath: $0) })
            monitor.availableMemory = 1 << 40
            let model = AppModel(
                monitor: monitor, folder: DocumentsFolder(documents: documents),
                openDownload: { try HubDownload(repository: $0, hub: hub) }, loadTokenizer: { _ in ByteTokenizer() })
            await model.refresh()
            await model.finishDownload()
            if model.problem == nil, model.library.bundles.isEmpty {
                model.downloads.repository = "someone/tied-mesp"
                await model.lookUp()
                await model.download()
            }
            try Data((model.problem?.english ?? "").utf8).write(
                to: URL(fileURLWithPath: try #require(Self.environment["MESP_SAID"])))
        }

        private enum End: Equatable {
            case killed
            /// The download ended with this problem; empty if it succeeded.
            case said(String)
        }

        private func download(
            _ hub: Hub, into documents: URL, _ library: URL, _ faults: [String: String] = [:]
        ) throws -> End {
            try documents.makeFolder()
            let said = folder.appendingPathComponent("said")
            let process = Process()
            process.executableURL = URL(fileURLWithPath: "/proc/self/exe").resolvingSymlinksInPath()
            process.arguments = ["--testing-library", "swift-testing", "--filter", "goesOnWithTheDownload"]
            process.environment = Self.environment.merging(faults) { $1 }.merging([
                "TMPDIR": newFolder().path, "LD_PRELOAD": library.path, "FAULTS_UNDER": documents.path,
                "MESP_DOWNLOAD_INTO": documents.path,
                "MESP_HUB": hub.url.absoluteString, "MESP_SAID": said.path,
            ]) { $1 }
            (process.standardOutput, process.standardError) = (FileHandle.nullDevice, FileHandle.nullDevice)
            try process.run()
            process.waitUntilExit()
            if process.terminationReason == .uncaughtSignal, process.terminationStatus == SIGKILL { return .killed }
            #expect(process.terminationStatus == 0)
            return .said(try String(contentsOf: said, encoding: .utf8))
        }

        private func compile(into library: URL) throws {
            let source = URL(fileURLWithPath: #filePath + "/../../../../../tests/helpers/faults.c").standardizedFileURL
            let compiler = Process()
            compiler.executableURL = URL(fileURLWithPath: "/usr/bin/env")
            compiler.arguments = ["clang", "-shared", "-fPIC", "-O1", source.path, "-o", library.path, "-ldl"]
            try compiler.run()
            compiler.waitUntilExit()
            try #require(compiler.terminationStatus == 0)
        }

        private func bundles(_ documents: URL) throws -> [URL] {
            try FileManager.default.contentsOfDirectory(at: documents, includingPropertiesForKeys: nil)
                .filter { $0.pathExtension == "mesp" }
        }
    }
#endif
