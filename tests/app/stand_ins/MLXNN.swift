// The part of mlx-swift's modules MLX and MLXNN that MeSPMLXLM needs beyond HostMLX, at commit
// 09051ed1986b6f2c69b6fda4e32ca42dd7dcdec3 (13 July 2026).

import MLX

// Source/MLX/Nested.swift of github.com/ml-explore/mlx-swift
public struct NestedDictionary<Key: Hashable, Element> {
    public func flattened(prefix: String? = nil) -> [(String, Element)] { [] }
    public static func unflattened(_ flat: some Collection<(String, Element)>) -> Self where Key == String { fatalError() }
}

// Source/MLXNN/Module.swift of github.com/ml-explore/mlx-swift
public typealias ModuleParameters = NestedDictionary<String, MLXArray>
public typealias ModuleChildren = NestedDictionary<String, Module>
open class Module {
    public init() {}
    open func parameters() -> ModuleParameters { fatalError() }
    open func namedModules() -> [(String, Module)] { [] }
    @discardableResult public func update(modules: ModuleChildren) -> Self { self }
}

// Source/MLXNN/Normalization.swift of github.com/ml-explore/mlx-swift
open class RMSNorm: Module {
    public let weight: MLXArray
    public let eps: Float
    public init(dimensions: Int, eps: Float = 1e-5) { fatalError() }
    open func callAsFunction(_ x: MLXArray) -> MLXArray { x }
}
