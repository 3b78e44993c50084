import http.server
import json
import os
import re
import subprocess
import threading
from pathlib import Path

import mlx.core as mx
import pytest

from helpers.commands import refused, succeeded
from helpers.exports import COMMAND, NEAREST, exported
from helpers.models import TEXT
from mesp.bundle.manifest import ModelName
from mesp.bundle.reader import Bundle

pytestmark = pytest.mark.usefixtures("working_folder")


class Hub(http.server.BaseHTTPRequestHandler):
    repositories: dict[str, dict[str, bytes]]
    revision = "0123456789abcdef0123456789abcdef01234567"

    def do_GET(self):
        path = self.path.split("?")[0]
        asked = re.fullmatch(r"(/api)?/(?:(models|datasets)/)?(org/\w+)(/.*)?", path)
        api, kind, name, rest = asked.groups() if asked else (None, None, None, None)
        files = self.repositories.get(f"{kind or 'models'}/{name}")
        if name == "org/gated" and not api:
            self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif files is None:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif api and "/tree/" in (rest or ""):
            tree = [
                {"type": "file", "path": path, "size": len(content), "oid": path}
                for path, content in files.items()
            ]
            self.reply(200, json.dumps(tree).encode())
        elif api:
            siblings = [{"rfilename": path} for path in files]
            info = {"_id": "0", "id": name, "sha": self.revision, "siblings": siblings}
            self.reply(200, json.dumps(info).encode())
        else:
            file = rest.split("/", 3)[3]
            headers = {"ETag": f'"{name}/{file}"', "X-Repo-Commit": self.revision}
            if file in files:
                self.reply(200, files[file], headers)
            else:
                self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None):
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


def export_from_hub(endpoint: str, *arguments: object) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(Path("hub").absolute())}
    command = [COMMAND, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture
def hub(tiny):
    model = {p.name: p.read_bytes() for p in tiny.iterdir()}
    model["README.md"] = b"---\nlicense: apache-2.0\n---\n# A model\n"
    model["model.gguf"] = b"not wanted"
    lines = "\n".join(json.dumps({"text": line}) for line in TEXT.splitlines() if line).encode()
    texts = {f"data/{split}.jsonl": lines for split in ("train", "validation", "test")}
    Hub.repositories = {
        "models/org/model": model,
        "models/org/gated": model,
        "datasets/org/texts": {**texts, "README.md": b"# Data\n", ".gitattributes": b""},
        "datasets/org/both": {**texts, "data/train.parquet": b"not wanted"},
        "datasets/org/more": {**texts, "data/more.jsonl": lines, "README.md": b"# Data\n"},
        "datasets/org/tables": {"data/train.parquet": b"not wanted"},
    }
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.usefixtures("stores_bfloat16")
def test_model_from_the_hub(hub, tiny):
    result = succeeded(export_from_hub(hub, "--model", "org/model", "--seq-len", 8, *NEAREST))
    assert result.stderr == ""
    bundle = Bundle("model.mesp")
    assert bundle.manifest.model == ModelName("org/model", Hub.revision, "apache-2.0")
    assert not list(Path("hub").rglob("*.gguf"))
    here = exported("--model", tiny, "--seq-len", 8, *NEAREST)
    assert mx.array_equal(bundle.block_words(2), here.block_words(2))


def test_model_that_the_hub_does_not_have(hub):
    said = refused(export_from_hub(hub, "--model", "org/nothing"))
    assert "no model org/nothing on the Hugging Face Hub" in said


def test_model_whose_terms_are_not_accepted(hub):
    said = refused(export_from_hub(hub, "--model", "org/gated"))
    assert "accept them on https://huggingface.co/org/gated" in said
    assert "`hf auth login`" in said


@pytest.mark.slow
def test_data_from_the_hub(hub, tiny):
    arguments = ("--model", tiny, "--seq-len", 8, "--out", "out.mesp")
    succeeded(export_from_hub(hub, *arguments, "--data", "org/texts"))
    assert list(Bundle("out.mesp").manifest.data) == ["train", "valid", "test"]
    assert not list(Path("hub").rglob(".gitattributes"))
    for name, said in (
        ("tables", "org/tables/data/train.parquet is not a parquet file that can be read: "),
        ("both", "org/both has both data/train.jsonl and data/train.parquet; keep one."),
        ("more", "org/more has data/more.jsonl, which is in no split: "),
        ("nothing", "no dataset org/nothing on the Hugging Face Hub"),
    ):
        data = ("--overwrite", "--data", f"org/{name}")
        assert said in refused(export_from_hub(hub, *arguments, *data))
    assert not list(Path("hub").rglob("more.jsonl"))


@pytest.mark.slow
def test_data_that_was_downloaded_needs_no_network(hub, tiny, monkeypatch):
    arguments = ("--model", tiny, "--seq-len", 8, "--data", "org/texts", *NEAREST)
    assert export_from_hub(hub, *arguments, "--out", "one.mesp").returncode == 0
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    succeeded(export_from_hub(hub, *arguments, "--out", "two.mesp"))
    assert Bundle("one.mesp").manifest.data == Bundle("two.mesp").manifest.data


def test_no_network():
    said = refused(export_from_hub("http://127.0.0.1:9", "--model", "Qwen2.5-0.5B"))
    assert "check the network" in said
    assert not list(Path().glob("*.mesp"))
