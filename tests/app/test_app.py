"""Checks of the app without a Mac.

The Swift sources are compiled as for iOS and macOS, against stand-ins for Apple's modules
(stand_ins/).
"""

import json
import plistlib
import re
import shutil
import subprocess
import sys
from array import array
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import phone
from helpers.commands import succeeded
from helpers.paths import ROOT
from helpers.swift_package import PARTS, RESOURCES, TRAITS, sources, target_info, tool
from mesp.bundle.reader import Bundle
from mesp.engine.build import find_engine
from mesp.runs.log import RunLog

HOME = ROOT / "ios" / "MeSPTrainer"
APP = HOME / "App"
PROJECT = HOME / "MeSPTrainer.xcodeproj"
HERE = Path(__file__).parent
BESIDE = ("MLXNN", "MLXLMCommon", "FoundationModels", "MLXFoundationModels")
BOTH = ("Tokenizers", "UniformTypeIdentifiers", "CoreTransferable", "SwiftUI", "Charts", *BESIDE)
STAND_INS = {
    "macOS": ("Darwin", "CryptoKit", "Metal", "AppKit", *BOTH, "UserNotifications", "Network"),
    "iOS": (
        *("Darwin", "CryptoKit", "Metal", "Security", "UIKit", "os", *BOTH),
        *("UserNotifications", "Network", "BackgroundTasks", "ActivityKit", "WidgetKit"),
        "AppIntents",
    ),
}
WIDGET = HOME / "Widget"
SHARED = WIDGET / "RunAttributes.swift"
UI_TESTS = HOME / "UITests"
APP_SOURCES = [*sorted(APP.rglob("*.swift")), SHARED]


def parse(text: str) -> dict:
    """Reads an Xcode project as JSON."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"^//.*$", "", text, flags=re.M)
    tokens = re.findall(r'"(?:[^"\\]|\\.)*"|[{}()=;,]|[^\s{}()=;,"]+', text)
    assert all(before in "{;" for before, token in pairwise(tokens) if token == "}")
    signs = {"{": "{", "}": "}", "=": ":", ";": ",", "(": "[", ")": "]", ",": ","}
    parts = [signs.get(t, t if t.startswith('"') else json.dumps(t)) for t in tokens]
    kept = [a for a, b in pairwise([*parts, ""]) if a != "," or b not in ("}", "]")]

    def unique(pairs: list[tuple]) -> dict:
        assert len(pairs) == len(dict(pairs)), "a key is there twice"
        return dict(pairs)

    return json.loads("".join(kept), object_pairs_hook=unique)


@pytest.fixture(scope="module")
def objects() -> dict[str, dict]:
    return parse((PROJECT / "project.pbxproj").read_text(encoding="utf-8"))["objects"]


def of(objects: dict[str, dict], isa: str) -> list[dict]:
    return [each for each in objects.values() if each["isa"] == isa]


def test_every_path_in_the_project_exists(objects: dict[str, dict]):
    for group in of(objects, "PBXFileSystemSynchronizedRootGroup"):
        assert (HOME / group["path"]).is_dir()
        for exceptions in group.get("exceptions", []):
            for path in objects[exceptions]["membershipExceptions"]:
                assert (HOME / group["path"] / path).is_file(), path
    files = [f for f in of(objects, "PBXFileReference") if f["sourceTree"] == "<group>"]
    assert all((HOME / f["path"]).exists() for f in files)
    for configuration in of(objects, "XCBuildConfiguration"):
        for key, path in configuration["buildSettings"].items():
            if key.startswith(("INFOPLIST_FILE", "CODE_SIGN_ENTITLEMENTS")):
                assert (HOME / path).is_file(), path


@pytest.fixture(scope="module")
def app(objects: dict[str, dict]) -> dict:
    (project,) = of(objects, "PBXProject")
    assert len(project["targets"]) == len(of(objects, "PBXNativeTarget"))
    targets = [objects[each] for each in project["targets"]]
    (app,) = (each for each in targets if each["productType"].endswith(".application"))
    return app


def test_what_comes_with_the_app_is_all_copied_into_it(objects: dict[str, dict], app: dict):
    (run,) = re.findall(r'resourceURL\?\.appending\(path: "(\w+)"\)', app_text())
    phases = [objects[each] for each in app["buildPhases"]]
    (phase,) = (each for each in phases if each["isa"] == "PBXResourcesBuildPhase")
    copied = {objects[objects[each]["fileRef"]]["path"] for each in phase["files"]}
    assert copied == {run, *(path.name for path in HOME.glob("*.mesp"))}


def app_text() -> str:
    return "\n".join(source.read_text(encoding="utf-8") for source in APP_SOURCES)


def test_the_tools_know_the_app_by_its_identifier(objects: dict[str, dict], app: dict):
    settings: dict[str, dict] = {}
    for holder in (*of(objects, "PBXProject"), app):
        for identifier in objects[holder["buildConfigurationList"]]["buildConfigurations"]:
            each = objects[identifier]
            settings.setdefault(each["name"], {}).update(each["buildSettings"])
    assert settings
    for each in settings.values():
        assert each["APP_IDENTIFIER"] == phone.APP
        assert each["PRODUCT_BUNDLE_IDENTIFIER"] == "$(APP_IDENTIFIER)"


def test_the_packages_and_their_products_exist(objects: dict[str, dict]):
    (local,) = of(objects, "XCLocalSwiftPackageReference")
    manifest = (HOME / local["relativePath"] / "Package.swift").resolve()
    assert manifest == ROOT / "Package.swift"
    text = manifest.read_text(encoding="utf-8")
    for each in of(objects, "XCSwiftPackageProductDependency"):
        if objects[each["package"]] == local:
            name = each["productName"]
            assert f'.library(name: "{name}", targets: ["{name}"])' in text


def test_what_the_views_import_is_linked(objects: dict[str, dict]):
    linked = {each["productName"] for each in of(objects, "XCSwiftPackageProductDependency")}
    elsewhere = {"Darwin", "CryptoKit", "Metal", "Security", "UIKit", "os"}
    elsewhere |= {"Tokenizers", "WidgetKit", *BESIDE}
    system = {"Foundation", *STAND_INS["iOS"]} - elsewhere

    def imports(sources: list[Path]) -> set[str]:
        text = "\n".join(source.read_text(encoding="utf-8") for source in sources)
        return set(re.findall(r"^ *(?:@\w+ )?import (\w+)", text, flags=re.M))

    assert imports(APP_SOURCES) == linked | system
    assert not imports(sorted(WIDGET.glob("*.swift"))) & linked


def test_the_app_takes_the_files_that_it_says_it_takes():
    info = plistlib.loads((APP / "Info.plist").read_bytes())
    assert info["UIFileSharingEnabled"] is True
    kinds = {
        kind: document["LSItemContentTypes"]
        for document in info["CFBundleDocumentTypes"]
        for kind in document["LSItemContentTypes"]
    }
    declared = [*info["UTExportedTypeDeclarations"], *info["UTImportedTypeDeclarations"]]
    own = {each["UTTypeIdentifier"] for each in declared}
    assert {kind for kind in kinds if not kind.startswith("public.")} == own
    (exported,) = info["UTExportedTypeDeclarations"]
    used = re.findall(r'UTType\(exportedAs: "(.+?)"\)', app_text())
    assert used == [exported["UTTypeIdentifier"]]
    extensions = exported["UTTypeTagSpecification"]["public.filename-extension"]
    assert [f".{each}" for each in extensions] == sorted({p.suffix for p in HOME.glob("Demo*.*")})


def test_info_plist_permits_what_the_app_asks_the_system_for():
    info = plistlib.loads((APP / "Info.plist").read_bytes())
    source = app_text()
    assert ("BGProcessingTaskRequest(" in source) == ("processing" in info["UIBackgroundModes"])
    named = re.findall(r'prefix \+ "(\.\w+)"', source)
    named += [f"{each}.*" for each in re.findall(r'"\\\(prefix\)(\.\w+)\.', source)]
    permitted = [f"$(PRODUCT_BUNDLE_IDENTIFIER){each}" for each in named]
    assert info["BGTaskSchedulerPermittedIdentifiers"] == permitted
    assert ("import ActivityKit\n" in source) == info["NSSupportsLiveActivities"]


def test_info_plist_lets_the_app_reach_a_server_in_the_local_network():
    info = plistlib.loads((APP / "Info.plist").read_bytes())
    # Plain http is allowed in the local network only.
    allowed = [key for key, value in info["NSAppTransportSecurity"].items() if value]
    assert allowed == ["NSAllowsLocalNetworking"]
    assert info["NSLocalNetworkUsageDescription"], "iOS asks the person with it"
    # Reading the device's host name would make iOS ask the person for access to the local network.
    for source in HOME.rglob("*.swift"):
        assert "processInfo.hostName" not in source.read_text(encoding="utf-8"), source.name


def used(patterns: dict[str, str]) -> set[str]:
    others = {"Engine", "Tests", "UITests"}
    paths = [p for p in HOME.rglob("*.swift") if p.relative_to(HOME).parts[0] not in others]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    return {key for key, pattern in patterns.items() if re.search(pattern, text)}


ENTITLED = {
    "device.audio-input": r"\bAVAudio(?:Session|Engine)\b",
    "device.camera": r"\bAVCapture\w+",
    "files.user-selected.read-write": r"\.file(?:Importer|Exporter|Mover)\(",
    "network.client": r"\b(?:URLSession|NWConnection)\b",
    "network.server": r"\bNWListener\b",
    "personal-information.location": r"\bCLLocationManager\b",
    "print": r"\bNSPrintOperation\b",
}


def test_on_a_mac_the_sandbox_permits_what_the_app_does_and_no_more():
    entitlements = plistlib.loads((APP / "MeSPTrainer-macOS.entitlements").read_bytes())
    assert entitlements.pop("com.apple.security.app-sandbox") is True
    assert set(entitlements.values()) == {True}
    assert entitlements.keys() == {f"com.apple.security.{name}" for name in used(ENTITLED)}


def test_the_recorded_run_is_of_the_demo_and_names_no_machine():
    run = RunLog.load(HOME / "Recorded")
    assert run.model in ("demo", "Demo")
    assert run.end["reason"] == "finished" and run.last_step >= 50
    assert run.settings["bundle"] == "Demo.mesp" and run.start["host"] == "recorded"
    text = (HOME / "Recorded" / "metrics.jsonl").read_text(encoding="utf-8")
    assert "/" not in re.sub(r"https?://\S+", "", text)


# developer.apple.com/documentation/bundleresources/describing-use-of-required-reason-api: the APIs
# in Swift, and the reasons that Apple lists.
REASONED = {
    "ActiveKeyboards": (r"\bactiveInputModes\b", {"3EC4.1", "54BD.1"}),
    "DiskSpace": (
        r"\bvolume(?:Available|Total)Capacity|\bsystem(?:Free)?Size\b|\bf?statv?fs\(",
        {"7D9E.1", "85F4.1", "B728.1", "E174.1"},
    ),
    "FileTimestamp": (
        r"\b(?:creation|modification|contentModification|fileModification)Date|\b[fl]?stat(?:at)?\(",
        {"0A2A.1", "3B52.1", "C617.1", "DDA9.1"},
    ),
    "SystemBootTime": (r"\bsystemUptime\b|\bmach_absolute_time\b", {"35F9.1", "3D61.1", "8FFB.1"}),
    "UserDefaults": (r"\bUserDefaults\b|@AppStorage\b", {"1C8F.1", "AC6B.1", "C56D.1", "CA92.1"}),
}


def test_the_privacy_manifest_gives_a_reason_for_each_api_that_needs_one():
    privacy = plistlib.loads((APP / "PrivacyInfo.xcprivacy").read_bytes())
    assert privacy["NSPrivacyTracking"] is False and privacy["NSPrivacyCollectedDataTypes"] == []
    accessed = "NSPrivacyAccessedAPI"
    given = {
        each[f"{accessed}Type"].removeprefix(f"{accessed}Category"): each[f"{accessed}TypeReasons"]
        for each in privacy["NSPrivacyAccessedAPITypes"]
    }
    assert given.keys() == used({name: pattern for name, (pattern, _) in REASONED.items()})
    for name, reasons in given.items():
        assert reasons and set(reasons) <= REASONED[name][1]


def test_the_demo_bundle_that_comes_with_the_app_is_whole():
    bundle = Bundle(HOME / "Demo.mesp")
    bundle.verify()
    assert {"train", "valid"} <= set(bundle.manifest.data)
    tokens = array("I", (bundle.path / "data" / "train.bin").read_bytes())
    text = Tokenizer.from_file(str(bundle.path / "tokenizer.json")).decode(list(tokens))
    assert text.count("Python") > 20 and "An assignment statement evaluates" in text


class Compiler:
    """The output is SIL, because type-checking alone finds neither data races nor missing returns.
    A copy of the sources is compiled, in which conditions such as `os(iOS)` have their values for
    `system`.
    """

    PACKAGE = {f"MeSP{part}" for part in PARTS} | {"engine"}

    def __init__(self, system: str, folder: Path) -> None:
        self.system, self.folder = system, folder
        self.modules = folder / "modules"
        self.modules.mkdir()
        build = find_engine().parent  # the folder with the compiled module MLX
        self.options = [*TRAITS, "-I", self.modules, "-I", build / "Modules"]
        self.options += ["-Xcc", f"-fmodule-map-file={build / 'CHostMLX.build/module.modulemap'}"]

    def compile(self, name: str, *sources: Path, version: int = 6) -> subprocess.CompletedProcess:
        command = ["-emit-sil", "-whole-module-optimization", "-o", self.folder / f"{name}.sil"]
        if "main.swift" not in {source.name for source in sources}:
            command += ["-parse-as-library", "-emit-module", "-emit-module-path"]
            command.append(self.modules / f"{name}.swiftmodule")
        return self.run(name, *command, *self.copies(name, *sources), version=version)

    def compile_what_differs(self, name: str, *sources: Path) -> subprocess.CompletedProcess:
        """SwiftPM's own build checks the other files, which are the same for every system."""
        copies = self.copies(name, *sources)
        command = ["-emit-module", "-whole-module-optimization", "-parse-as-library"]
        command += ["-Xfrontend", "-experimental-skip-all-function-bodies", "-emit-module-path"]
        done = self.run(name, *command, self.modules / f"{name}.swiftmodule", *copies)
        differ = [
            copy
            for source, copy in zip(sources, copies, strict=True)
            if re.search(r"^ *#(?:else)?if ", source.read_text(encoding="utf-8"), re.M)
        ]
        if done.returncode or not differ:
            return done
        command = ["-frontend", "-emit-sil", "-parse-as-library", "-plugin-path"]
        command.append(f"{target_info()['paths']['runtimeResourcePath']}/host/plugins")
        for copy in differ:
            command += ["-primary-file", copy, "-o", copy.with_suffix(".sil")]
        return self.run(name, *command, *(copy for copy in copies if copy not in differ))

    def copies(self, name: str, *sources: Path) -> list[Path]:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        made = []
        for source in sources:
            text = source.read_text(encoding="utf-8")
            copy = folder / source.relative_to(source.anchor)
            copy.parent.mkdir(parents=True, exist_ok=True)
            newest = r"\bcompiler\(>=[\d.]+\)|\bcanImport\(\w+, _version: \d+\)"
            text = re.sub(rf"\bos\({self.system}\)|{newest}", "true", text)
            text = re.sub(r"\b(?:os|targetEnvironment)\(\w+\)", "false", text)
            copy.write_text(text, encoding="utf-8")
            made.append(copy)
        return made

    def run(self, name: str, *command: object, version: int = 6) -> subprocess.CompletedProcess:
        first, *others = command
        line = [tool("swiftc"), first, "-module-name", name, "-swift-version", version]
        if name in self.PACKAGE:
            line += ["-package-name", "mesp"]
        return subprocess.run(
            [str(part) for part in (*line, *self.options, *others)], capture_output=True, text=True
        )

    def compile_stand_ins(self) -> None:
        for name in STAND_INS[self.system]:
            stand_in = HERE / "stand_ins" / f"{name}.swift"
            succeeded(self.compile(name, stand_in, version=5))

    def app_modules(self) -> dict[str, list[Path]]:
        resources = self.folder / "Resources.swift"
        resources.write_text(RESOURCES, encoding="utf-8")
        modules = {f"MeSP{part}": sources(part) for part in PARTS}
        for name in ("MeSP", "MeSPAppModel"):
            modules[name].append(resources)
        return modules | {"MeSPTrainer": APP_SOURCES}


FAULTS = {
    "risks causing data races": (
        "final class Count { var value = 0 }\n"
        "func f() { let count = Count(); Task.detached { count.value = 1 }; count.value = 2 }"
    ),
    "missing return": "func f(_ x: Int) -> Int { if x > 0 { return 1 } }",
    "not concurrency-safe": "func f() -> UInt32 { mach_task_self_ }",
    "cannot find 'nowhere'": "#if os(Linux)\n#else\nfunc f() { nowhere() }\n#endif",
}


def assert_no_warning(done: subprocess.CompletedProcess) -> None:
    assert done.returncode == 0 and "warning:" not in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin", reason="Xcode compiles the app itself")
@pytest.mark.parametrize("system", ["macOS", "iOS"])
def test_all_of_it_compiles_as_for_a_system_of_apples(system: str, tmp_path: Path):
    compiler = Compiler(system, tmp_path)

    def compile(name: str, *sources: Path) -> str:
        assert_no_warning(compiler.compile(name, *sources))
        return (tmp_path / f"{name}.sil").read_text(encoding="utf-8")

    compiler.compile_stand_ins()
    modules = compiler.app_modules()
    if system == "iOS":
        said = (sentence_keys(compile(name, *sources)) for name, sources in modules.items())
        assert_catalog_has(set().union(*said))
        compile("MeSPWidget", *WIDGET.glob("*.swift"))
    else:
        views = modules.pop("MeSPTrainer")  # SwiftPM does not compile the app
        for name, sources in modules.items():
            assert_no_warning(compiler.compile_what_differs(name, *sources))
        compile("MeSPTrainer", *views)
    examples = {f"{article.stem}Example": swift_blocks(article) for article in ARTICLES}
    examples["BesideMLXSwiftLM"] = swift_blocks(ROOT / "docs" / "mlx-swift-lm.md")
    assert (len(examples), len(examples["BesideMLXSwiftLM"])) == (4, 5)
    short = swift_blocks(CATALOGUE / "MeSP.md")[0].replace("import MeSP\n", "")
    examples["Landing"] = [GIVEN, short, "} }"]
    for name, blocks in examples.items():
        source = tmp_path / f"{name}.swift"
        source.write_text("\n".join(blocks), encoding="utf-8")
        compile(name, source)
    compile("tutor", *sorted((HOME / "Example").glob("*.swift")))
    if system == "macOS":
        sil = compile("engine", *sorted((HOME / "Engine").glob("*.swift")))
        # A closure in main.swift is isolated to the main actor unless it is declared otherwise. If
        # the system calls such a closure on its own threads, Swift's check ends the process.
        assert "setEventHandler" in sil and "_checkExpectedExecutor" not in sil

    fault = tmp_path / "Fault.swift"
    for said, text in FAULTS.items():
        fault.write_text(f"import Darwin\nimport MeSPCore\n{text}\n", encoding="utf-8")
        done = compiler.compile("Fault", fault)
        assert done.returncode != 0 and said in done.stderr, said


@pytest.mark.skipif(sys.platform == "darwin", reason="Xcode compiles the UI test itself")
def test_the_ui_test_compiles(tmp_path: Path):
    compiler = Compiler("iOS", tmp_path)
    succeeded(compiler.compile("XCTest", HERE / "stand_ins" / "XCTest.swift", version=5))
    assert_no_warning(compiler.compile("MeSPTrainerUITests", *UI_TESTS.glob("*.swift")))


CATALOGUE = HOME / "MeSP" / "MeSP.docc"
ARTICLES = [
    page for page in sorted(CATALOGUE.glob("*.md")) if "# ``" not in page.read_text("utf-8")
]


def swift_blocks(page: Path) -> list[str]:
    blocks = re.findall(r"```swift\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
    assert blocks, page.name
    return blocks


GIVEN = """import Foundation
import MeSP

@MainActor final class Given {
    private var progress = 0.0
    private let (url, folder, bundle, text): (URL, URL, URL, URL)
    private let tokenizer: any TextTokenizer
    private let conversations: [Conversation]

    init(_ url: URL, _ tokenizer: any TextTokenizer, _ conversations: [Conversation]) {
        (self.url, folder, bundle, text) = (url, url, url, url)
        (self.tokenizer, self.conversations) = (tokenizer, conversations)
    }

    func run() async throws {
"""


def test_the_examples_that_swift_tests_run_are_those_of_the_articles():
    """Swift tests run all examples except views, because Linux has no SwiftUI. Of the page on
    mlx-swift-lm they run the part that needs the library alone.
    """
    run = (HOME / "Tests" / "MeSP" / "Examples.swift").read_text(encoding="utf-8")
    blocks = [
        re.sub(r"^import \w+\n", "", block, flags=re.M).strip()
        for article in ARTICLES
        for block in swift_blocks(article)
        if "import SwiftUI\n" not in block
    ]
    beside = swift_blocks(ROOT / "docs" / "mlx-swift-lm.md")[0]
    blocks.append(beside[beside.index("///") :].strip())
    assert [block for block in blocks if block not in run] == []


def test_the_librarys_documentation_builds(symbol_graphs: Path, tmp_path: Path):
    graphs = tmp_path / "graphs"
    graphs.mkdir()
    for graph in symbol_graphs.glob("MeSP[.@]*"):
        shutil.copy(graph, graphs)
    options = ["--additional-symbol-graph-dir", graphs, "--output-path", tmp_path / "archive"]
    options += ["--fallback-display-name", "MeSP", "--fallback-bundle-identifier", "org.mesp"]
    convert = [tool("docc"), "convert", CATALOGUE, *options, "--warnings-as-errors"]
    done = subprocess.run(convert, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def literals(text: str) -> list[str]:
    found, place = [], 0

    def read(place: int) -> int:
        parts = []
        while text[place] != '"':
            if text.startswith("\\(", place):
                place, depth = place + 2, 1
                while depth:
                    if text[place] == '"':
                        place = read(place + 1)
                    depth += {"(": 1, ")": -1}.get(text[place], 0)
                    place += 1
                parts.append("%@")
            else:
                parts.append(text[place])
                place += 1
        found.append("".join(parts))
        return place + 1

    text = re.sub(r"//.*", "", text)
    while (place := text.find('"', place)) >= 0:
        place = read(place + 1)
    return found


def catalog(name: str) -> dict[str, dict]:
    catalog = json.loads((APP / f"{name}.xcstrings").read_text(encoding="utf-8"))
    assert catalog["sourceLanguage"] == "en" and catalog["version"] == "1.0"
    return catalog["strings"]


def test_the_string_catalog_has_every_sentence_of_the_views():
    said = {
        text
        for view in [
            *(APP / "MeSPTrainerApp.swift", APP / "ContinueTrainingIntent.swift"),
            *(APP / "Views").glob("*.swift"),
        ]
        for text in literals(view.read_text(encoding="utf-8"))
        if re.search(r"[A-Za-z]", text.replace("%@", "")) and (text[0].isupper() or " " in text)
    }
    # Xcode's keys distinguish numbers and words. `literals` returns %@ for both.
    listed = {re.sub(r"%(\d\$)?(lld|@)", "%@", key) for key in catalog("Localizable")}
    assert said - listed == set(), "add them to Localizable.xcstrings"
    assert listed - said == set(), "no view says them"


def sentence_keys(sil: str) -> set[str]:
    found: set[str] = set()
    literal, keys = "", []
    calls = r"init\(literalCapacity|append\w+|init\(stringInterpolation|init\(stringLiteral"
    steps = (
        rf'= string_literal utf8 (".*") +//|// function_ref Sentence\.(?:Interpolation\.)?({calls})'
        r".*\n.*"
    )
    for step in re.finditer(steps, sil):
        if step[1]:
            literal = step[1]
        elif step[2] == "init(literalCapacity":
            keys.append("")
        elif step[2] == "appendLiteral":
            keys[-1] += json.loads(literal).replace("%", "%%")
        elif step[2] == "appendInterpolation":
            keys[-1] += "%lld" if "BinaryInteger" in step[0] else "%@"
        elif step[2] == "init(stringInterpolation":
            found.add(keys.pop())
        elif step[2] == "init(stringLiteral":
            found.add(json.loads(literal))
    return found


def assert_catalog_has(said: set[str]) -> None:
    said = {key for key in said if re.search(r"[A-Za-z]", re.sub(r"%(lld|@)", "", key))}
    listed = catalog("Sentences")
    assert said - set(listed) == set(), "add them to Sentences.xcstrings"
    assert set(listed) - said == set(), "nothing says them"
    assert {entry["extractionState"] for entry in listed.values()} == {"manual"}
