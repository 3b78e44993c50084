import json
import shutil

import mlx.core as mx
import pytest
from click.testing import CliRunner

from conftest import TINY, random_tensors
from mesp.bundle import PAGE, Bundle, read_manifest
from mesp.errors import MespError
from mesp.export import main


@pytest.fixture(scope="session")
def exported(tiny, tmp_path_factory):
    """The tiny model as a bundle, not to be changed."""
    out = tmp_path_factory.mktemp("bundles") / "tiny.mesp"
    arguments = ["--model", tiny, "--data", "python-docs", "--seq-len", 16, 32, "--out", out]
    result = CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture
def copy(exported, tmp_path):
    """The same to be changed, and a function that changes its manifest."""
    folder = tmp_path / "copy.mesp"
    shutil.copytree(exported, folder)

    def edit(**changes) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return folder, edit


def test_arrays_are_the_models(exported):
    bundle = Bundle(exported)
    tensors = random_tensors(TINY)
    for i in range(3):
        block = bundle.block(i)
        norm = tensors[f"model.layers.{i}.input_layernorm.weight"]
        bias = tensors[f"model.layers.{i}.self_attn.k_proj.bias"]
        down = mx.quantize(tensors[f"model.layers.{i}.mlp.down_proj.weight"], 64, 4)
        assert mx.array_equal(block["input_layernorm.weight"], norm)
        assert mx.array_equal(block["self_attn.k_proj.bias"], bias)
        for part, array in zip(("weight", "scales", "biases"), down, strict=True):
            assert mx.array_equal(block[f"mlp.down_proj.{part}"], array)
    embedding = mx.quantize(tensors["model.embed_tokens.weight"], 64, 4)
    for part, array in zip(("weight", "scales", "biases"), embedding, strict=True):
        assert mx.array_equal(bundle.embedding()[part], array)
        assert mx.array_equal(bundle.head()[part], array)
    assert mx.array_equal(bundle.head()["norm"], tensors["model.norm.weight"])


def test_files_can_be_mapped(exported):
    """Whole pages, arrays on 64-byte boundaries that do not overlap, and every file listed."""
    manifest = read_manifest(exported)
    files = {entry["path"]: entry["size"] for entry in manifest["files"]}
    on_disk = {p.relative_to(exported).as_posix() for p in exported.rglob("*") if p.is_file()}
    assert on_disk == {*files, "manifest.json"}
    for name, entry in (("blocks/02.bin", "block"), ("embedding.bin", "embedding")):
        assert files[name] == manifest[entry]["words"] * 4
        assert files[name] % PAGE == 0
        end = 0
        for array in manifest[entry]["arrays"]:
            assert array["offset"] % 16 == 0 and array["offset"] >= end
            size = mx.zeros(array["shape"], getattr(mx, array["dtype"])).nbytes
            end = array["offset"] + size // 4
        assert end <= manifest[entry]["words"]
    keys = "format name model mlx_version device dtype architecture quantization seq_lens ranks "
    keys += "block embedding head data files"
    assert list(manifest) == keys.split()


def test_tokens(exported):
    bundle = Bundle(exported)
    for split, entry in bundle.manifest["data"].items():
        tokens = bundle.tokens(split)
        assert len(tokens) == entry["tokens"] and tokens.max() < 512
    with pytest.raises(MespError, match="holds no test data"):
        bundle.tokens("test")


def test_verify_names_the_damaged_file(copy):
    folder, _ = copy
    Bundle(folder).verify()
    file = folder / "blocks" / "01.bin"
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)
    with pytest.raises(MespError, match=r"01\.bin is damaged"):
        Bundle(folder).verify()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": 2}, "format 2"),
        ({"mlx_version": "0.32.0"}, r"MLX 0\.32\.0"),
        pytest.param(
            {"device": "gpu"},
            "for a GPU",
            marks=pytest.mark.skipif(mx.metal.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_bundle_that_cannot_run_here(copy, changes, named):
    folder, edit = copy
    edit(**changes)
    with pytest.raises(MespError, match=named):
        Bundle(folder)


def test_missing_file_is_named(copy):
    folder, _ = copy
    (folder / "embedding.bin").unlink()
    with pytest.raises(MespError, match=r"embedding\.bin is missing"):
        Bundle(folder)


def test_truncated_file_is_named(copy):
    folder, _ = copy
    file = folder / "blocks" / "00.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(MespError, match=r"00\.bin is .* bytes long, not"):
        Bundle(folder)


def test_folder_that_is_no_bundle(tmp_path):
    with pytest.raises(MespError, match="not a bundle"):
        Bundle(tmp_path)


@pytest.mark.parametrize("manifest", ["", "{", "[]", "{}", '{"format": 1}'])
def test_damaged_manifest(tmp_path, manifest):
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(MespError, match=r"manifest\.json cannot be read"):
        Bundle(tmp_path)
