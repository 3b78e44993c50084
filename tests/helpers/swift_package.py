import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from helpers.paths import APP, ROOT
from mesp.engine.build import find_engine

PARTS = ("Sentences", "Files", "Bundle", "Import", "Adapters", "Core", "Control", "")
PARTS += ("Federation", "Download", "SelfCheck", "AppModel", "Tokenizers", "MLXLM")
TRAITS = ("-DTokenizers", "-DMLXLM")
STAND_INS = ROOT / "tests" / "app" / "stand_ins"
RESOURCES = "import Foundation\nextension Bundle { static let module = Bundle.main }\n"
LIBRARIES = ("MeSP", "MeSPTokenizers", "MeSPMLXLM")
IMPLICIT = {"Copyable", "Escapable", "SendableMetatype"}


def tool(name: str) -> str:
    found = shutil.which(name)
    if not found and shutil.which("xcrun"):
        found = subprocess.check_output(["xcrun", "--find", name], text=True).strip()
    assert found, "install Swift 6"
    return found


def target_info() -> dict:
    return json.loads(subprocess.check_output([tool("swiftc"), "-print-target-info"], text=True))


def sources(part: str) -> list[Path]:
    return sorted((APP / (part or "MeSP")).rglob("*.swift"))


def write_symbol_graphs(folder: Path) -> Path:
    build = find_engine().parent  # contains MLX's compiled module
    modules, graphs, resources = folder / "modules", folder / "graphs", folder / "Resources.swift"
    modules.mkdir(parents=True)
    graphs.mkdir()
    resources.write_text(RESOURCES, encoding="utf-8")
    common = ["-I", modules, "-I", build / "Modules"]
    common += ["-Xcc", f"-fmodule-map-file={build / 'CHostMLX.build/module.modulemap'}"]
    if shutil.which("xcrun"):
        sdk = subprocess.check_output(["xcrun", "--show-sdk-path"], text=True).strip()
        common += ["-sdk", sdk]

    def compile(name: str, files: list[Path], *options: str) -> None:
        command = [tool("swiftc"), "-emit-module", "-emit-module-path"]
        command += [modules / f"{name}.swiftmodule", "-module-name", name, *options, *common]
        command += ["-whole-module-optimization", "-parse-as-library", "-package-name", "mesp"]
        run([*command, "-Xfrontend", "-experimental-skip-all-function-bodies", *files])

    for name in ("Tokenizers", "MLXNN", "MLXLMCommon"):
        compile(name, [STAND_INS / f"{name}.swift"], "-swift-version", "5")
    for part in PARTS:
        name = f"MeSP{part}"
        compile(name, [*sources(part), resources], "-swift-version", "6", *TRAITS)
        command = [tool("swift-symbolgraph-extract"), "-module-name", name, *common]
        command += ["-minimum-access-level", "public", "-output-dir", graphs]
        run([*command, "-target", target_info()["target"]["triple"]])
    return graphs


def run(command: list) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Symbol(NamedTuple):
    module: str
    path: tuple[str, ...]
    declaration: str
    is_documented: bool
    conformances: tuple[str, ...]


def public_symbols(graphs: Path) -> list[Symbol]:
    found = []
    for file in sorted(graphs.glob("*.symbols.json")):
        module = file.name.removesuffix(".symbols.json").partition("@")[0]
        graph = json.loads(file.read_text(encoding="utf-8"))
        relations: dict[str, list[dict]] = {}
        for each in graph["relationships"]:
            relations.setdefault(each["source"], []).append(each)
        for each in graph["symbols"]:
            identifier, kind = each["identifier"]["precise"], each["kind"]["identifier"]
            if "::SYNTHESIZED::" in identifier or kind == "swift.extension":
                continue
            fragments, related = each["declarationFragments"], relations.get(identifier, [])
            conforms = (r.get("targetFallback") for r in related if r["kind"] == "conformsTo")
            found.append(
                Symbol(
                    module,
                    tuple(each["pathComponents"]),
                    " ".join("".join(part["spelling"] for part in fragments).split()),
                    "docComment" in each,
                    tuple(sorted({c.split(".")[-1] for c in conforms if c} - IMPLICIT)),
                )
            )
    return found


def public_api(symbols: list[Symbol]) -> str:
    lines = []
    for each in symbols:
        if each.module in LIBRARIES:
            conformances = f": {', '.join(each.conformances)}" if each.conformances else ""
            lines.append(f"{each.module}  {'.'.join(each.path)}  {each.declaration}{conformances}")
    return "\n".join(sorted(lines)) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(public_api(public_symbols(write_symbol_graphs(Path(temporary)))), end="")
