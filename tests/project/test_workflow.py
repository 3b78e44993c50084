import re
import subprocess
import sys
from importlib.metadata import requires
from itertools import product
from pathlib import Path

import click
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import nightly
from helpers.commands import call, invoke, succeeded
from helpers.models import TINY, write_model
from helpers.paths import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CI = ROOT / ".github" / "workflows" / "ci.yml"
RELEASE = ROOT / ".github" / "workflows" / "release.yml"
LOCK = ROOT / ".ci" / "requirements.txt"
IMAGE = ROOT / ".ci" / "image.txt"
each_workflow = pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)


def content(workflow: Path) -> dict:
    return yaml.safe_load(workflow.read_text(encoding="utf-8"))


def steps(workflow: Path) -> list[dict]:
    return [step for job in content(workflow)["jobs"].values() for step in job["steps"]]


def commands(workflow: Path) -> str:
    jobs = content(workflow)["jobs"].values()
    variables = [value for job in jobs for value in job.get("env", {}).values()]
    return "\n".join([*variables, *(step.get("run", "") for step in steps(workflow))])


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", ".github/workflows/*.yml"),
        ("dependabot", ".github/dependabot.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("citation-file-format", "CITATION.cff"),
    ],
)
def test_the_schema_takes_them(schema: str, files: str):
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    found = sorted(ROOT.glob(files))
    assert found
    if schema == "citation-file-format":
        command += ["--default-filetype", "yaml"]
    command += map(str, found)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@each_workflow
def test_actions_are_named_by_their_commits(workflow: Path):
    """A tag could be moved to other code, which would get the repository's token."""
    for step in steps(workflow):
        action, _, commit = step.get("uses", "").partition("@")
        assert not action or re.fullmatch("[0-9a-f]{40}", commit), action
        if action == "actions/checkout":
            assert step["with"]["persist-credentials"] is False


@each_workflow
def test_only_the_job_that_publishes_may_write(workflow: Path):
    found = content(workflow)
    assert found["permissions"] == {"contents": "read"}
    granted = {name for name, job in found["jobs"].items() if "permissions" in job}
    assert granted == ({"publish"} if workflow == RELEASE else set())


def test_a_release_is_tested_and_only_a_tag_publishes_it():
    found = content(RELEASE)
    assert found[True] == {"push": {"tags": ["v*"]}, "workflow_dispatch": None}  # YAML's `on`
    jobs = found["jobs"]
    publish = jobs.pop("publish")
    assert publish["if"] == "github.event_name == 'push'"
    assert sorted(publish["needs"]) == sorted(jobs) and publish["environment"] == "release"
    for name in jobs.keys() - {"notes"}:
        run = [step.get("run", "") for step in jobs[name]["steps"]]
        tested = run.index(".venv/bin/python -m pytest -q -m wheel tests/project")
        assert run.index("make dist") < tested
    # A password or token for PyPI is nowhere: its trusted publisher knows the job.
    assert "secrets." not in RELEASE.read_text(encoding="utf-8")
    used = [step["uses"].partition("@")[0] for step in publish["steps"] if "uses" in step]
    assert used[-2:] == ["actions/attest-build-provenance", "pypa/gh-action-pypi-publish"]


@each_workflow
def test_only_locked_packages_are_installed(workflow: Path):
    assert (ROOT / content(workflow)["env"]["LOCK"]) == LOCK
    assert not re.search(r"\bpip\b", commands(workflow))


def test_the_image_has_only_locked_packages():
    text = (ROOT / "Dockerfile").read_text("utf-8")
    let_in = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    installs = re.findall(r"pip install ([^\\\n]*)", text)
    assert installs
    for install in installs:
        lock = re.search(r"--require-hashes --requirement /mesp/(\S+)", install)
        if lock:
            assert (ROOT / lock[1]).exists() and f"!{lock[1]}" in let_in
        else:
            assert "--no-deps --no-build-isolation" in install


@pytest.mark.parametrize(("lock", "extras"), [(LOCK, ("", "report", "dev")), (IMAGE, ("",))])
def test_a_lock_has_every_package_with_its_hashes(lock: Path, extras: tuple[str, ...]):
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
    """A folder that a step creates begins with build/ or a dot, and is not tested."""
    for path in re.findall(r"(?<![\w./-])(?:ios|tests|tools|docs)/[\w./-]+", commands(workflow)):
        assert (ROOT / path).exists(), path


def test_the_app_is_built_for_each_system_as_run_in_xcode_builds_it():
    """Build settings on the command line would also apply to packages. Only signing is turned off,
    because there is no team.
    """
    job = content(CI)["jobs"]["app"]
    given = re.findall(r"\b([A-Z_]+)=\S+", " ".join(job["env"].values()))
    assert set(given) <= {"CODE_SIGNING_ALLOWED"}
    builds = [
        line.strip()
        for step in job["steps"]
        for line in step.get("run", "").splitlines()
        if re.match(r" *\$XCODE (build|test)", line)
    ]
    assert [build for build in builds if re.search(r" [A-Z_]+=", build)] == []
    names = {"iOS": "iphoneos", "iOS Simulator": "iphonesimulator", "macOS": "macosx"}
    built = {names[each] for each in re.findall(r"platform=([\w ]+)", "\n".join(builds))}
    (project,) = set(re.findall(r"-project (\S+)", commands(CI)))
    pbxproj = (ROOT / project / "project.pbxproj").read_text(encoding="utf-8")
    supported = re.findall(r'SUPPORTED_PLATFORMS = "(.+?)";', pbxproj)
    assert supported and built == {each for one in supported for each in one.split()}


@pytest.mark.slow
def test_the_nightly_check_passes_on_the_demo_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(
        nightly, "command", lambda module, *given: call(module.split(".")[2], *given)
    )
    options = ("--model", "demo", "--learning-rate", 0.001, "--out", tmp_path / "night")
    done = succeeded(invoke(nightly.main, "nightly.py", *options))
    for what in ("the model", "with adapters", "fused"):
        assert re.search(rf"^{what}: [\d.]+ in the trainer, [\d.]+ in mlx-lm$", done.stdout, re.M)


def test_the_nightly_check_runs_no_code_of_a_model(tmp_path: Path):
    model = write_model(tmp_path / "model", {**TINY, "model_file": "code.py"})
    harm = tmp_path / "harm"
    (model / "code.py").write_text(f"import pathlib; pathlib.Path({str(harm)!r}).touch()")
    night = [sys.executable, ROOT / "tools" / "nightly.py", "--model", model]
    done = subprocess.run([*night, "--out", tmp_path / "night"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "is Python code, which mlx-lm would run" in done.stderr
    assert not harm.exists()


def test_the_nightly_check_fails_where_a_loss_is_another():
    nightly.check("the model", 3.0, 3.001)
    with pytest.raises(click.ClickException, match=r"the losses differ by 0\.01"):
        nightly.check("the model", 3.0, 3.01)
