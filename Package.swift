// swift-tools-version: 6.0

// The trainer's core; `mesp-engine`, the program around it; and the model of the app's views.
//
// Module `MLX` is mlx-swift. If MESP_HOST_MLX names the folder of the `mlx` wheel, it is ios/HostMLX, which has the same API with the wheel's C++
// library (see its Package.swift). An app with mlx-swift 0.32.2 crashes below iOS and macOS 26.4.

import PackageDescription

let hostMLX = Context.environment["MESP_HOST_MLX"] != nil
let mlx: Package.Dependency =
    hostMLX
    ? .package(path: "ios/HostMLX")
    : .package(url: "https://github.com/ml-explore/mlx-swift", .upToNextMinor(from: "0.32.3"))

let mlxModule: Target.Dependency = .product(name: "MLX", package: hostMLX ? "HostMLX" : "mlx-swift")

/// The flag for code that differs with HostMLX: mlx-swift has a fixed version of MLX, and HostMLX asks the wheel for MLX's version.
let swiftSettings: [SwiftSetting] = hostMLX ? [.define("MESP_HOST_MLX")] : []

/// Whether the engine is built for a wheel. Such an engine has no `federate`, because on Linux Foundation's networking needs libcurl, which a wheel
/// cannot rely on.
let isForWheel = Context.environment["MESP_WHEEL"] != nil

/// The setting that leaves the tests unoptimized in a release build, because optimizing them takes a third of the build's time.
let quickly: [SwiftSetting] = hostMLX ? [.unsafeFlags(["-Onone"], .when(configuration: .release))] : []

/// The simulation of Metal's behaviour, for the core's tests.
let metal: [Target.Dependency] = hostMLX ? [.product(name: "HostMLXMetal", package: "HostMLX")] : []

/// The modules whose steps ios/HostMLXLedger counts.
let forLedger: [Product] =
    hostMLX
    ? [.library(name: "Trainer", targets: ["MeSPBundle", "MeSPCore", "MeSPSelfCheck", "MeSPSentences"])] : []

let package = Package(
    name: "MeSP",
    platforms: [.iOS(.v17), .macOS(.v14)],
    products: [
        .library(name: "MeSP", targets: ["MeSP"]),
        // The library for the app of this repository.
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
            name: "MeSPControl", dependencies: ["MeSPCore", "MeSPFiles", "MeSPSentences", mlxModule],
            path: "ios/MeSPTrainer/Control"),
        .target(
            name: "MeSP",
            dependencies: [
                "MeSPAdapters", "MeSPBundle", "MeSPControl", "MeSPCore", "MeSPFiles", "MeSPImport", "MeSPSentences",
            ],
            path: "ios/MeSPTrainer/MeSP",
            resources: [.process("general.txt")]),
        .target(
            name: "MeSPBundle", dependencies: ["MeSPFiles", "MeSPSentences", mlxModule],
            path: "ios/MeSPTrainer/Bundle",
            swiftSettings: swiftSettings),
        .target(
            name: "MeSPDownload", dependencies: ["MeSPBundle", "MeSPFiles", "MeSPImport", "MeSPSentences"],
            path: "ios/MeSPTrainer/Download"),
        .target(
            name: "MeSPImport", dependencies: ["MeSPBundle", "MeSPFiles", "MeSPSentences"],
            path: "ios/MeSPTrainer/Import",
            swiftSettings: swiftSettings),
        .target(name: "MeSPFiles", dependencies: ["MeSPSentences"], path: "ios/MeSPTrainer/Files"),
        .target(
            name: "MeSPSelfCheck",
            dependencies: [
                "MeSPAdapters", "MeSPBundle", "MeSPControl", "MeSPCore", "MeSPFiles", "MeSPSentences", mlxModule,
            ],
            path: "ios/MeSPTrainer/SelfCheck"),
        .target(
            name: "MeSPFederation",
            dependencies: [
                "MeSPAdapters", "MeSPBundle", "MeSPControl", "MeSPCore", "MeSPFiles", "MeSPSentences", mlxModule,
            ],
            path: "ios/MeSPTrainer/Federation"),
        .target(name: "MeSPSentences", path: "ios/MeSPTrainer/Sentences"),
        .executableTarget(
            name: "mesp-engine",
            dependencies: [
                "MeSPAdapters", "MeSPBundle", "MeSPCore", "MeSPFiles", "MeSPImport", "MeSPSelfCheck", "MeSPSentences",
                mlxModule,
            ] + (isForWheel ? [] : ["MeSPFederation"]),
            path: "ios/MeSPTrainer/Engine",
            exclude: isForWheel ? ["Federate.swift"] : [],
            swiftSettings: swiftSettings + (isForWheel ? [.define("MESP_WHEEL")] : [])),
        .target(
            name: "MeSPAppModel",
            dependencies: [
                "MeSP", "MeSPAdapters", "MeSPBundle", "MeSPControl", "MeSPCore", "MeSPDownload", "MeSPFederation",
                "MeSPFiles", "MeSPImport", "MeSPSelfCheck",
            ],
            path: "ios/MeSPTrainer/AppModel",
            resources: [.process("paper.json")]),
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

// MeSPTokenizers reads the tokenizer in a bundle, for apps. With MESP_HOST_MLX no target needs that module, so its dependencies are not fetched.
if !hostMLX {
    package.dependencies.append(
        .package(url: "https://github.com/huggingface/swift-transformers", from: "1.3.4"))
    package.products.append(.library(name: "MeSPTokenizers", targets: ["MeSPTokenizers"]))
    package.targets.append(
        .target(
            name: "MeSPTokenizers",
            dependencies: ["MeSP", .product(name: "Tokenizers", package: "swift-transformers")],
            path: "ios/MeSPTrainer/Tokenizers"))
}
