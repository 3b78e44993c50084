import json
import shutil
import subprocess
from pathlib import Path

import pytest

from helpers.commands import invoke, refused, succeeded
from helpers.paths import DEMO_BUNDLE
from helpers.phones import APP, Phones
from push import main


@pytest.fixture(params=["xcrun", "pymobiledevice3"], autouse=True)
def program(phones: Phones, request: pytest.FixtureRequest) -> None:
    phones.program = request.param


def push(phones: Phones, *arguments: object) -> subprocess.CompletedProcess:
    return invoke(main, "push.py", *arguments, env=phones.environment())


def test_a_bundle_lands_in_documents(phones: Phones):
    documents = phones.add("Ada's iPhone").parent
    for _ in range(2):  # it can be pushed again
        done = succeeded(push(phones, DEMO_BUNDLE))
        assert done.stdout.startswith("Demo.mesp is on ")
        assert done.stderr == ""
    copied = documents / "Demo.mesp"
    manifest = json.loads((copied / "manifest.json").read_text())
    for file in manifest["files"]:
        assert (copied / file["path"]).read_bytes() == (DEMO_BUNDLE / file["path"]).read_bytes()
    assert [path.name for path in documents.iterdir()] == ["Demo.mesp"]


def test_one_of_several_phones_is_chosen(phones: Phones):
    first = phones.add("Ada's iPhone").parent
    second = phones.add("Grace's iPhone").parent
    assert refused(push(phones, DEMO_BUNDLE)).startswith("Several phones can be reached")
    assert push(phones, DEMO_BUNDLE, "--device", "0000-1").returncode == 0
    assert not list(first.iterdir()) and list(second.iterdir())


def test_what_is_no_whole_bundle_is_refused_before_anything_is_copied(
    phones: Phones, tmp_path: Path
):
    phones.add("Ada's iPhone")
    assert "is not a bundle" in refused(push(phones, tmp_path))
    half = tmp_path / "half.mesp"
    half.mkdir()
    (half / "manifest.json").write_text((DEMO_BUNDLE / "manifest.json").read_text())
    assert str(half) in refused(push(phones, half))
    other = tmp_path / "other"
    shutil.copytree(DEMO_BUNDLE, other)
    assert refused(push(phones, other)) == (
        "The app lists folders that end in .mesp: rename other first."
    )
    assert phones.calls() == []


def test_the_app_is_not_installed_or_the_phone_is_locked(phones: Phones):
    phones.add("Ada's iPhone", apps={})
    assert refused(push(phones, DEMO_BUNDLE)).startswith(f"The app {APP} is not on the phone ")
    phones.world["devices"][0]["locked"] = True
    assert refused(push(phones, DEMO_BUNDLE)).endswith(" is locked: unlock it and try again.")


def test_what_a_phone_is_called_is_text(phones: Phones):
    phones.program = "pymobiledevice3"
    phones.add("[/b] \x1b]0;a\x07")
    done = push(phones, DEMO_BUNDLE)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert "is on [/b]" in done.stdout and "\x1b]" not in done.stdout + done.stderr
