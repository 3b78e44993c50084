// swift-tools-version: 6.1

// This package has MeSP's trainer, the program `mesp-engine`, and MeSPAppModel, the model of the app's views.
//
// Module `MLX` is mlx-swift or, if MESP_HOST_MLX is set, ios/HostMLX. HostMLX has a part of mlx-swift's API and uses the C++ library of the `mlx`
// wheel in the folder MESP_HOST_MLX. The lowest version of mlx-swift is 0.32.3, because an app with 0.32.2 crashes below iOS and macOS 26.4.

import PackageDescription

let hostMLX = Context.environment["MESP_HOST_MLX"] != nil
let mlx: Package.Dependency =
    hostMLX
    ? .package(path: "ios/HostMLX")
    : .package(url: "https://github.com/ml-explore/mlx-swift", .upToNextMinor(from: "0.32.3"))

let mlxModule: Target.Dependency = .product(name: "MLX", package: hostMLX ? "HostMLX" : "mlx-swift")

/// The compiler flag for code that differs between mlx-swift and HostMLX. Empty without HostMLX.
let swiftSettings: [SwiftSetting] = hostMLX ? [.define("MESP_HOST_MLX")] : []

/// Whether the engine is built for a wheel. Such an engine has no `federate` command. On Linux, `federate` needs libcurl, and a wheel cannot rely on
/// libcurl.
let isForWheel = Context.environment["MESP_WHEEL"] != nil

/// The setting that turns off optimization where no time is spent, in a release build on this machine. Optimizing these targets takes most of a build's
/// time. Empty without HostMLX, and for a wheel.
let quickly: [SwiftSetting] =
    hostMLX && !isForWheel ? [.unsafeFlags(["-Onone"], .when(configuration: .release))] : []

/// The test dependency that simulates Metal's behaviour. Empty without HostMLX.
let metal: [Target.Dependency] = hostMLX ? [.product(name: "HostMLXMetal", package: "HostMLX")] : []

/// The product that ios/HostMLXLedger uses. Empty without HostMLX.
let forLedger: [Product] =
    hostMLX
    ? [.library(name: "Trainer", targets: ["MeSPBundle", "MeSPCore", "MeSPSelfCheck", "MeSPSentences"])] : []

let package = Package(
    name: "MeSP",
    platforms: [.iOS(.v17), .macOS(.v14)],
    products: [
        .library(name: "MeSP", targets: ["MeSP"]),
        .library(name: "MeSPAppModel", targets: ["MeSPAppModel"]),
        .executable(name: "mesp-engine", targets: ["mesp-engine"]),
    ] + forLedger,
    dependencies: [mlx],
    targets: [
        .target(
            name: "MeSPAdapters", dependencies: ["MeSPBundle", "MeSPFiles", "MeSPSentences", mlxModule],
            path: "ios/MeSPTrainer/Adapters"),
        .target(
            name: "MeSPCore", dependencies: ["MeSPAdapters", "MeSPBundle", "MeSPFiles", "MeSPSentences", mlxModule],
            path: "ios/MeSPTrainer/Core"),
        .target(
            name: "MeSPControl", dependencies: ["MeSPBundle", "MeSPCore", "MeSPFiles", "MeSPSentences", mlxModule],
            path: "ios/MeSPTrainer/Control",
            swiftSettings: quickly),
        .target(
            name: "MeSP",
            dependencies: [
                "MeSPAdapters", "MeSPBundle", "MeSPControl", "MeSPCore", "MeSPFiles", "MeSPImport", "MeSPSentences",
                mlxModule,
            ],
            path: "ios/MeSPTrainer/MeSP",
            resources: [.process("general.txt"), .copy("PrivacyInfo.xcprivacy")],
            swiftSettings: quickly),
        .target(
            name: "MeSPBundle", dependencies: ["MeSPFiles", "MeSPSentences", mlxModule],
            path: "ios/MeSPTrainer/Bundle",
            swiftSettings: swiftSettings),
        .target(
            name: "MeSPDownload", dependencies: ["MeSPBundle", "MeSPFiles", "MeSPImport", "MeSPSentences"],
            path: "ios/MeSPTrainer/Download",
            swiftSettings: quickly),
        .target(
            name: "MeSPImport", dependencies: ["MeSPBundle", "MeSPFiles", "MeSPSentences"],
            path: "ios/MeSPTrainer/Import",
            swiftSettings: swiftSettings + quickly),
        .target(name: "MeSPFiles", dependencies: ["MeSPSentences"], path: "ios/MeSPTrainer/Files"),
        .target(
            name: "MeSPSelfCheck",
            dependencies: [
                "MeSPAdapters", "MeSPBundle", "MeSPControl", "MeSPCore", "MeSPFiles", "MeSPSentences", mlxModule,
            ],
            path: "ios/MeSPTrainer/SelfCheck",
            swiftSettings: quickly),
        .target(
            name: "MeSPFederation",
            dependencies: [
                "MeSPAdapters", "MeSPBundle", "MeSPControl", "MeSPCore", "MeSPFiles", "MeSPSentences", mlxModule,
            ],
            path: "ios/MeSPTrainer/Federation",
            swiftSettings: quickly),
        .target(name: "MeSPSentences", path: "ios/MeSPTrainer/Sentences"),
        .executableTarget(
            name: "mesp-engine",
            dependencies: [
                "MeSPAdapters", "MeSPBundle", "MeSPCore", "MeSPFiles", "MeSPImport", "MeSPSelfCheck", "MeSPSentences",
                mlxModule,
            ] + (isForWheel ? [] : ["MeSPFederation"]),
            path: "ios/MeSPTrainer/Engine",
            exclude: isForWheel ? ["Federate.swift"] : [],
            swiftSettings: swiftSettings + quickly + (isForWheel ? [.define("MESP_WHEEL")] : [])),
        .target(
            name: "MeSPAppModel",
            dependencies: [
                "MeSP", "MeSPAdapters", "MeSPBundle", "MeSPControl", "MeSPCore", "MeSPDownload", "MeSPFederation",
                "MeSPFiles", "MeSPImport", "MeSPSelfCheck",
            ],
            path: "ios/MeSPTrainer/AppModel",
            resources: [.process("paper.json")],
            swiftSettings: quickly),
        .executableTarget(name: "tutor", dependencies: ["MeSP"], path: "ios/MeSPTrainer/Example"),
        .testTarget(
            name: "MeSPTests",
            dependencies: [
                "MeSP", "MeSPAdapters", "MeSPAppModel", "MeSPBundle", "MeSPControl", "MeSPCore", "MeSPFederation",
                "MeSPImport", "MeSPSelfCheck", "MeSPSentences",
            ] + metal,
            path: "ios/MeSPTrainer/Tests",
            exclude: ["Download/hub_server.py"],
            swiftSettings: quickly),
    ]
)

// An app gets these two only by a trait. Builds with HostMLX have neither, so they fetch nothing.
if !hostMLX {
    package.traits = [
        .trait(name: "MLXLM", description: "MeSPMLXLM uses the tokenizer and the model of an mlx-swift-lm container."),
        .trait(name: "Tokenizers", description: "MeSPTokenizers reads a bundle's tokenizer with swift-transformers."),
    ]
    package.dependencies += [
        .package(url: "https://github.com/ml-explore/mlx-swift-lm", .upToNextMinor(from: "3.32.3")),
        .package(url: "https://github.com/huggingface/swift-transformers", from: "1.3.4"),
    ]
    package.products += [
        .library(name: "MeSPMLXLM", targets: ["MeSPMLXLM"]),
        .library(name: "MeSPTokenizers", targets: ["MeSPTokenizers"]),
    ]
    package.targets += [
        .target(
            name: "MeSPMLXLM",
            dependencies: [
                "MeSP", mlxModule,
                .product(name: "MLXLMCommon", package: "mlx-swift-lm", condition: .when(traits: ["MLXLM"])),
            ],
            path: "ios/MeSPTrainer/MLXLM"),
        .target(
            name: "MeSPTokenizers",
            dependencies: [
                "MeSP",
                .product(
                    name: "Tokenizers", package: "swift-transformers", condition: .when(traits: ["Tokenizers"])),
            ],
            path: "ios/MeSPTrainer/Tokenizers"),
    ]
}
