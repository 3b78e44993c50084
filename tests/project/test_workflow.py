"""The workflows are as GitHub's schema has them, and what they name exists."""

import re
import subprocess
import sys
from importlib.metadata import requires
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import nightly
from helpers.commands import call, invoke
from helpers.models import TINY, write_model
from helpers.paths import ROOT
from mesp.engine.build import find_engine
from mesp.models.families import FAMILIES

PROJECT = ROOT / "ios" / "MeSPTrainer" / "MeSPTrainer.xcodeproj"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
LOCK = ROOT / ".ci" / "requirements.txt"
IMAGE = ROOT / ".ci" / "image.txt"
each_workflow = pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)


def steps(workflow: Path) -> list[dict]:
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def commands(workflow: Path) -> str:
    """The commands of a workflow's steps, with the variables that its jobs set."""
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    variables = [value for job in jobs.values() for value in job.get("env", {}).values()]
    return "\n".join([*variables, *(step.get("run", "") for step in steps(workflow))])


def test_there_are_workflows():
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "nightly.yml"]


def test_the_schema_takes_them():
    command = [sys.executable, "-m", "check_jsonschema"]
    command += ["--builtin-schema", "vendor.github-workflows", *map(str, WORKFLOWS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@each_workflow
def test_actions_are_named_by_their_commits(workflow: Path):
    """A tag can be moved to other code, which would have the repository's token."""
    for step in steps(workflow):
        action, _, commit = step.get("uses", "").partition("@")
        assert not action or re.fullmatch("[0-9a-f]{40}", commit), action
        if action == "actions/checkout":
            assert step["with"]["persist-credentials"] is False


@each_workflow
def test_only_locked_packages_are_installed(workflow: Path):
    variables = yaml.safe_load(workflow.read_text(encoding="utf-8"))["env"]
    assert (ROOT / variables["LOCK"]) == LOCK
    assert not re.search(r"\bpip\b", commands(workflow))


def test_the_image_has_only_locked_packages():
    text = (ROOT / "Dockerfile").read_text("utf-8")
    installs = re.findall(r"pip install ([^\\\n]*)", text)
    lock = f"--require-hashes --requirement /mesp/{IMAGE.relative_to(ROOT)}"
    assert len(installs) == 2 and lock in installs[0]
    assert "--no-deps --no-build-isolation /mesp" in installs[1]
    assert f"!{IMAGE.relative_to(ROOT)}\n" in (ROOT / ".dockerignore").read_text("utf-8")


@pytest.mark.parametrize(("lock", "extras"), [(LOCK, ("", "report", "dev")), (IMAGE, ("",))])
def test_a_lock_has_every_package_with_its_hashes(lock: Path, extras: tuple[str, ...]):
    """For each of the systems and Pythons; `make lock` rewrites both."""
    wanted = [Requirement(each) for each in requires("mesp")]
    wanted.append(Requirement("setuptools>=77"))  # builds the package
    entries = re.findall(r"^(\S.*?) \\\n((?: +--hash=.*\n)+)", lock.read_text("utf-8"), re.M)
    locked = [Requirement(entry) for entry, _ in entries]
    assert all("sha256:" in hashes for _, hashes in entries)
    assert len(locked) == len(re.findall(r"^[^ #]", lock.read_text("utf-8"), re.M))
    for system, version in product(("linux", "darwin"), ("3.11", "3.12", "3.13", "3.14")):
        machine = {"sys_platform": system, "python_version": version}
        machine["python_full_version"] = f"{version}.9"
        there = {
            each.name: next(iter(each.specifier)).version
            for each in locked
            if each.marker is None or each.marker.evaluate(machine)
        }
        for each, extra in product(wanted, extras):
            if each.marker is None or each.marker.evaluate(machine | {"extra": extra}):
                assert there[canonicalize_name(each.name)] in each.specifier, (each, machine)


@each_workflow
def test_the_targets_of_make_exist(workflow: Path):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z][\w-]*)", commands(workflow))) - {"python3-venv"}
    assert named
    assert named - set(re.findall(r"^([\w-]+):", makefile, flags=re.M)) == set()


@each_workflow
def test_the_paths_exist(workflow: Path):
    """A folder that is only made by a step begins with build/ or with a dot."""
    for path in re.findall(r"(?<![\w./-])(?:ios|tests|tools|docs)/[\w./-]+", commands(workflow)):
        assert (ROOT / path).exists(), path


def test_the_scheme_is_the_projects_and_tests_the_screens():
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    text = commands(workflow)
    assert PROJECT.relative_to(ROOT).as_posix() in text
    (scheme,) = set(re.findall(r"-scheme (\w+)", text))
    file = PROJECT / "xcshareddata" / "xcschemes" / f"{scheme}.xcscheme"
    (tested,) = ElementTree.parse(file).iterfind("TestAction/Testables/TestableReference")
    assert tested.get("skipped") == "NO"
    (test,) = re.findall(r"\$XCODE test .*", text)
    assert '-destination "platform=iOS Simulator,id=$device"' in test
    # The oldest Xcode compiles it too.
    assert '$XCODE build-for-testing -destination "platform=iOS Simulator,id=$device"' in text
    # The app is installed from where it was built, and launched by its identifier.
    (derived,) = re.findall(r"-derivedDataPath (\S+)", text)
    built = f"{derived}/Build/Products/Release-iphonesimulator/{scheme}.app"
    assert f'simctl install "$device" {built}' in text
    project = (PROJECT / "project.pbxproj").read_text(encoding="utf-8")
    (identifier,) = set(re.findall(r"APP_IDENTIFIER = (\S+);", project))
    assert f'simctl launch "$device" {identifier}' in text
    # The result that the test writes is what is exported and kept.
    (result,) = re.findall(r"-resultBundlePath (\S+)", test)
    (exported,) = re.findall(rf"export attachments --path {result} --output-path (\S+)", text)
    kept = [step["with"]["path"] for step in steps(workflow) if "upload" in step.get("uses", "")]
    assert [exported, result] in [path.split() for path in kept]
    assert "build/check-gpu/self-check.*" in kept


def test_the_app_is_built_as_run_in_xcode_builds_it():
    """A setting of the command line holds for packages too, and Run has none."""
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    job = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]["app"]
    assert re.findall(r"\b[A-Z_]+=\S+", job["env"]["XCODE"]) == []
    builds = [
        line.strip()
        for step in job["steps"]
        for line in step.get("run", "").splitlines()
        if re.match(r" *\$XCODE (build|test)", line)
    ]
    # Of a generic destination all architectures would be built; iPhones have one.
    places = {re.search(r"-destination (['\"])(.*?)\1", build)[2]: build for build in builds}
    assert set(places) == {
        "generic/platform=iOS", "platform=macOS,arch=arm64", "platform=iOS Simulator,id=$device",
    }  # fmt: skip
    # Nothing but a missing team is other than in Xcode, and a Mac needs none.
    for place, build in places.items():
        assert ("$UNSIGNED" in build) == ("macOS" not in place)
    assert job["env"]["UNSIGNED"] == "CODE_SIGNING_ALLOWED=NO"
    scheme = ElementTree.parse(PROJECT / "xcshareddata" / "xcschemes" / "MeSPTrainer.xcscheme")
    assert scheme.find("BuildAction").get("buildArchitectures") == "Automatic"


def test_one_swift_format_decides():
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    styled = [
        name
        for name, job in jobs.items()
        for step in job["steps"]
        if re.search(r"\bmake (check|test|test-format)$", step.get("run", ""))
    ]
    assert set(styled) == {"linux"}


def test_a_job_without_a_self_check_says_so():
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    steps = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]["macos"]["steps"]
    (probe,) = [step["run"] for step in steps if step.get("id") == "gpu"]
    # A wheel that cannot be imported fails the step, and is no GPU that is missing.
    assert probe.splitlines()[0].endswith('-c "import mlx.core"')
    _, otherwise = probe.split("\nelse\n")
    assert "::warning" in otherwise and "GITHUB_STEP_SUMMARY" in otherwise
    used = [step for step in steps if "steps.gpu.outputs.works" in step.get("if", "")]
    assert [step.get("run") for step in used] == ["make check-gpu", None]


def test_a_model_of_each_family_is_checked_each_night():
    text = (ROOT / ".github" / "workflows" / "nightly.yml").read_text(encoding="utf-8")
    models = yaml.safe_load(text)["jobs"]["model"]["strategy"]["matrix"]["include"]
    # The text of others' alone, and what mlx-lm does not read, or only from checkpoints of its own;
    # and mixtures of experts, of which none is published that fits the disk of such a machine.
    left_out = ("qwen3_5_text", "gemma4_text", "ministral3", "qwen3_vl", "lfm3")
    left_out += ("lfm2_moe", "qwen3_moe", "qwen3_5_moe", "qwen3_5_moe_text")
    published = [name for name in FAMILIES if name not in left_out]
    assert [each["family"] for each in models] == published
    assert models[0]["model"] == "Qwen/Qwen2.5-0.5B"


@pytest.mark.slow
def test_the_nightly_check_passes_on_the_demo_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    find_engine()
    monkeypatch.setattr(
        nightly, "command", lambda module, *given: call(module.split(".")[2], *given)
    )
    options = ("--model", "demo", "--learning-rate", 0.001, "--out", tmp_path / "night")
    done = invoke(nightly.main, "nightly.py", *options)
    assert done.returncode == 0, done.stderr
    for what in ("the model", "with adapters", "fused"):
        assert re.search(rf"^{what}: [\d.]+ in the trainer, [\d.]+ in mlx-lm$", done.stdout, re.M)


def test_the_nightly_check_runs_no_code_of_a_model(tmp_path: Path):
    model = write_model(tmp_path / "model", {**TINY, "model_file": "code.py"})
    harm = tmp_path / "harm"
    (model / "code.py").write_text(f"import pathlib; pathlib.Path({str(harm)!r}).touch()")
    night = [sys.executable, ROOT / "tools" / "nightly.py", "--model", model]
    done = subprocess.run(
        [*night, "--out", tmp_path / "night"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "is Python code, which mlx-lm would run" in done.stderr
    assert not harm.exists()


def test_the_nightly_check_fails_where_a_loss_is_another():
    nightly.check("the model", 3.0, 3.001)
    with pytest.raises(click.ClickException, match=r"the losses differ by 0\.01"):
        nightly.check("the model", 3.0, 3.01)
