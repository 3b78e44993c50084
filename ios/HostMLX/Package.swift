// swift-tools-version: 6.0

// HostMLX: a module `MLX` for machines where mlx-swift cannot be used.
//
// It spells a subset of mlx-swift 0.32.3's API and runs on the MLX C++ library inside the `mlx` wheel of PyPI
// (`mlx/include`, `mlx/lib`), so the numbers are MLX's own. Build with the wheel's folder in one variable:
//
//     pip install 'mlx[cpu]>=0.32.2,<0.33' scipy-openblas32
//     MESP_HOST_MLX=/path/to/site-packages/mlx swift build -c release
//
// Where `scipy_openblas32` lies beside `mlx`, matrix products go through its OpenBLAS: the Linux wheel brings the
// reference BLAS, some fifty times slower. (SwiftPM caches manifests: after installing it later, delete `.build`.)

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

/// Where a program looks for the wheel's libraries: there, or, where MESP_WHEEL says so, from its own folder on.
let whenRun = Context.environment["MESP_WHEEL"] ?? wheel

func link(_ folder: String) -> [String] {
    ["-L" + wheel + folder, "-Xlinker", "-rpath", "-Xlinker", whenRun + folder]
}

// MLX's headers call std::bind, for which GCC 12's library uses what C++20 deprecates.
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
        // Not mlx-swift's: Metal's behaviour where a CPU is kinder.
        .library(name: "HostMLXMetal", targets: ["HostMLXMetal"]),
        // For the hooks of ios/HostMLXLedger.
        .library(name: "CHostMLX", targets: ["CHostMLX"]),
    ],
    targets: [
        .target(name: "CHostMLX", cxxSettings: cxxSettings, linkerSettings: linkerSettings),
        .target(name: "MLX", dependencies: ["CHostMLX"]),
        .executableTarget(name: "ProductTimes", dependencies: ["MLX"]),
        .target(name: "HostMLXMetal", dependencies: ["CHostMLX", "MLX"]),
        .testTarget(name: "MLXTests", dependencies: ["MLX", "HostMLXMetal"]),
    ],
    cxxLanguageStandard: .cxx20
)
