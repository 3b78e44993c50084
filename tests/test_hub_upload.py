import json
import shutil
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from huggingface_hub import HfApi, ModelCard, errors

from helpers.commands import call, refused, run
from helpers.paths import DEMO_BUNDLE
from mesp.bundle.manifest import File, Manifest, ModelName
from mesp.bundle.reader import Bundle
from mesp.commands.export import main
from mesp.errors import MespError
from mesp.hub_upload import card, upload


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Mock:
    hub = Mock()
    hub.create_repo.return_value = "https://huggingface.co/someone/demo-mesp"
    for name in ("create_repo", "upload_file", "upload_folder"):
        monkeypatch.setattr(HfApi, name, getattr(hub, name))
    return hub


def test_the_manifest_and_its_files_are_uploaded(hub: Mock):
    manifest = Bundle(DEMO_BUNDLE).manifest
    assert upload(DEMO_BUNDLE, manifest, "someone/demo-mesp").endswith("/someone/demo-mesp")
    hub.create_repo.assert_called_once_with("someone/demo-mesp", exist_ok=True)
    options = hub.upload_folder.call_args.kwargs
    assert options["repo_id"] == "someone/demo-mesp" and options["folder_path"] == DEMO_BUNDLE
    files = {file.path for file in manifest.files}
    assert set(options["allow_patterns"]) == files | {"manifest.json"}
    assert all((DEMO_BUNDLE / path).is_file() for path in files)
    deleted = options["delete_patterns"]
    assert "block.128.mlxfn" in files
    assert all(any(fnmatch(path, pattern) for pattern in deleted) for path in files)


def test_the_card_names_the_source_and_its_license():
    manifest = Bundle(DEMO_BUNDLE).manifest
    model = ModelName("Qwen/Qwen2.5-0.5B", "abc", "apache-2.0")
    text = card(replace(manifest, model=model)).decode()
    assert text.startswith(
        "---\nlibrary_name: mesp\nbase_model: Qwen/Qwen2.5-0.5B\nlicense: apache-2.0\n---\n"
    )
    local = replace(model, id="/home/me/model", revision=None)
    assert "/home/me" not in card(replace(manifest, model=local)).decode()


def test_the_card_has_a_licence_of_its_own_and_the_repository_of_a_gguf_file():
    manifest = Bundle(DEMO_BUNDLE).manifest
    licence = ("other", "own: terms", "https://example.com/LICENSE")
    model = ModelName("someone/model-GGUF/model.Q8_0.gguf", "abc", *licence)
    made = replace(manifest, model=model)
    assert ModelCard(card(made).decode()).data.to_dict() == {
        "library_name": "mesp",
        "base_model": "someone/model-GGUF",
        "license": "other",
        "license_name": "own: terms",
        "license_link": "https://example.com/LICENSE",
    }
    assert Manifest.of(json.loads(json.dumps(made.to_json()))).model == model


@pytest.mark.parametrize(
    ("model", "files", "is_known"),
    [
        (ModelName("m"), [], False),
        (ModelName("m", None, "other"), ["NOTICE", "USE_POLICY.md", "data/LICENSE"], False),
        (ModelName("m"), ["license.PDF"], True),
        (ModelName("m"), ["GEMMA_TERMS_OF_USE.txt"], True),
        (ModelName("m", None, "mit"), [], True),
        (ModelName("m", None, "other", "own"), [], True),
    ],
)
def test_a_bundle_without_a_licence_is_not_uploaded(hub: Mock, model, files, is_known):
    manifest = Bundle(DEMO_BUNDLE).manifest
    manifest = replace(manifest, model=model, files=tuple(File(f, 1, "") for f in files))
    if is_known:
        assert upload(DEMO_BUNDLE, manifest, "a/b")
        return
    with pytest.raises(MespError, match=r"put its LICENSE beside config\.json and export again"):
        upload(DEMO_BUNDLE, manifest, "a/b")
    assert hub.mock_calls == []


def test_an_export_that_cannot_be_uploaded_writes_nothing(hub: Mock, tiny: Path, tmp_path: Path):
    model, out = shutil.copytree(tiny, tmp_path / "model"), tmp_path / "out.mesp"
    words = ("--model", model, "--seq-len", 8, "--out", out)
    said = refused(run("export", *words, "--upload", "a/b"))
    assert "model has no licence, so it is not uploaded" in said
    assert not out.exists() and hub.mock_calls == []
    call("export", *words)
    again = ("--from", out, "--out", tmp_path / "again.mesp", "--upload", "a/b")
    assert "has no licence" in refused(run("export", *again))
    assert not (tmp_path / "again.mesp").exists()
    (model / "Notice").write_text("They made it.")
    (model / "LICENSE.txt").write_text("You may.")
    call("export", *words, "--overwrite", "--upload", "a/b")
    options = hub.upload_folder.call_args.kwargs
    assert {"Notice", "LICENSE.txt"} < set(options["allow_patterns"])
    deleted = options["delete_patterns"]
    assert all(any(fnmatch(f, p) for p in deleted) for f in ("Notice", "LICENSE.txt"))


class Response:
    def __init__(self, status_code: int) -> None:
        self.status_code, self.headers, self.request = status_code, {}, None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.HFValidationError("bad"), "is not a name of a repository: give it as owner/name."),
        (errors.LocalTokenNotFoundError("none"), "Log in to the Hugging Face Hub first"),
        (errors.HfHubHTTPError("no", response=Response(403)), "does not let you write to a/b"),
        (errors.HfHubHTTPError("no", response=Response(500)), "check the network and run"),
        (ConnectionError("gone"), "could not be uploaded to a/b: check the network and run"),
    ],
)
def test_what_the_hub_refuses_is_a_sentence(hub: Mock, error: Exception, said: str):
    hub.create_repo.side_effect = error
    with pytest.raises(MespError, match=said):
        upload(DEMO_BUNDLE, Bundle(DEMO_BUNDLE).manifest, "a/b")


def test_the_command_uploads_what_it_has_written(hub: Mock, tmp_path: Path):
    out = tmp_path / "demo.mesp"
    words = ["--from", DEMO_BUNDLE, "--out", out, "--upload", "someone/demo-mesp"]
    done = CliRunner().invoke(main, list(map(str, words)))
    assert done.exit_code == 0, done.output
    assert "https://huggingface.co/someone/demo-mesp" in done.output
    assert hub.upload_folder.call_args.kwargs["folder_path"] == out
