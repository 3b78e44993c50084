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
open class Module {
    open func parameters() -> ModuleParameters { fatalError() }
    open func namedModules() -> [(String, Module)] { [] }
}
