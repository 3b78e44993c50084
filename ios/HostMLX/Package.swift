// swift-tools-version: 6.0

// HostMLX: a module `MLX` for machines where mlx-swift cannot be used.
//
// It implements a subset of mlx-swift 0.32.3's API with the MLX C++ library in the `mlx` wheel of PyPI (`mlx/include`, `mlx/lib`). Build it with the
// wheel's folder in a variable:
//
//     pip install 'mlx[cpu]>=0.32.2,<0.33' scipy-openblas32
//     MESP_HOST_MLX=/path/to/site-packages/mlx swift build -c release
//
// If `scipy_openblas32` is installed beside `mlx`, matrix products use its OpenBLAS. The BLAS in MLX's Linux wheel is about fifty times slower.
// SwiftPM caches manifests, so delete `.build` if you install `scipy_openblas32` after a build.

import Foundation
import PackageDescription

guard let wheel = Context.environment["MESP_HOST_MLX"] else {
    fatalError("HostMLX: set MESP_HOST_MLX to the folder `site-packages/mlx` of the wheel mlx, 0.32.2 or later")
}

#if os(Linux)
    let openBLAS = "/../scipy_openblas32/lib"
    let hasOpenBLAS = FileManager.default.fileExists(atPath: wheel + openBLAS + "/libscipy_openblas.so")
#else
    let openBLAS = ""
    let hasOpenBLAS = false  // the macOS wheel uses Accelerate
#endif

/// The folder where a program looks for the wheel's libraries: MESP_WHEEL or, by default, the folder that the build uses.
let whenRun = Context.environment["MESP_WHEEL"] ?? wheel

func link(_ folder: String) -> [String] {
    ["-L" + wheel + folder, "-Xlinker", "-rpath", "-Xlinker", whenRun + folder]
}

// MLX's headers use std::bind, and GCC 12's std::bind uses the deprecated std::result_of.
var cxxSettings: [CXXSetting] = [.unsafeFlags(["-isystem", wheel + "/include", "-Wno-deprecated-declarations"])]
var linkerSettings: [LinkerSetting] = [.unsafeFlags(link("/lib")), .linkedLibrary("mlx")]
if hasOpenBLAS {
    cxxSettings.append(.define("HOST_OPENBLAS"))
    linkerSettings += [.unsafeFlags(link(openBLAS)), .linkedLibrary("scipy_openblas")]
}

let package = Package(
    name: "HostMLX",
    platforms: [.iOS(.v17), .macOS(.v14)],
    products: [
        .library(name: "MLX", targets: ["MLX"]),
        // Behaviour of Metal that a CPU does not show. mlx-swift has no such library.
        .library(name: "HostMLXMetal", targets: ["HostMLXMetal"]),
        .library(name: "CHostMLX", targets: ["CHostMLX"]),
    ],
    targets: [
        .target(name: "CHostMLX", cxxSettings: cxxSettings, linkerSettings: linkerSettings),
        .target(name: "MLX", dependencies: ["CHostMLX"]),
        .executableTarget(name: "ProductTimes", dependencies: ["MLX"]),
        .target(name: "HostMLXMetal", dependencies: ["CHostMLX", "MLX"]),
        .testTarget(
            name: "MLXTests", dependencies: ["MLX", "HostMLXMetal"],
            // Optimizing the tests takes longer than running them.
            swiftSettings: [.unsafeFlags(["-Onone"], .when(configuration: .release))]),
    ],
    cxxLanguageStandard: .cxx20
)
