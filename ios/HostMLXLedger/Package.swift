// swift-tools-version: 6.0

// Builds the ledger (docs/gpu.md) and the tool `mesp-count`. The ledger runs on Linux and counts what a training step would cost on a phone's GPU.
//
// This package is separate, so that builds of the trainer do not compile it. `make ledger` builds it.

import PackageDescription

guard let wheel = Context.environment["MESP_HOST_MLX"] else {
    fatalError("HostMLXLedger: set MESP_HOST_MLX to the folder `site-packages/mlx` of the wheel mlx, 0.32.2 or later")
}

// In C++ code, CHostMLX's header includes MLX's C++ headers. It must not be imported as a C++20 module.
let cxxSettings: [CXXSetting] = [
    .unsafeFlags(["-isystem", wheel + "/include", "-Wno-deprecated-declarations", "-fno-cxx-modules"])
]

let trainer: Target.Dependency = .product(name: "Trainer", package: "MeSP")
let mlx: Target.Dependency = .product(name: "MLX", package: "HostMLX")
let hooks: Target.Dependency = .product(name: "CHostMLX", package: "HostMLX")

let package = Package(
    name: "HostMLXLedger",
    platforms: [.iOS(.v17), .macOS(.v14)],
    products: [
        .library(name: "HostMLXLedger", targets: ["HostMLXLedger"]),
        .executable(name: "mesp-count", targets: ["mesp-count"]),
    ],
    dependencies: [
        .package(path: "../HostMLX"),
        // Without `name`, targets would have to call the package by the name of the checkout's folder.
        .package(name: "MeSP", path: "../.."),
    ],
    targets: [
        .target(name: "CLedger", dependencies: [hooks], cxxSettings: cxxSettings),
        .target(name: "HostMLXLedger", dependencies: ["CLedger", mlx]),
        .executableTarget(
            name: "mesp-count",
            dependencies: ["HostMLXLedger", trainer]),
        .target(name: "CLedgerProbe", dependencies: [hooks], path: "Tests/CLedgerProbe", cxxSettings: cxxSettings),
        .testTarget(name: "LedgerTests", dependencies: ["CLedgerProbe", "HostMLXLedger", mlx]),
        .testTarget(
            name: "StepTests",
            dependencies: ["HostMLXLedger", mlx, trainer]),
    ],
    cxxLanguageStandard: .cxx20
)
