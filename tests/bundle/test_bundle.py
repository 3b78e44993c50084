import itertools
import json
import shutil
import sys

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import load_adapters

from helpers.commands import call
from helpers.exports import NEAREST
from helpers.models import FAMILIES, mlx_lm_model, write_model
from mesp import reference
from mesp.bundle.export import export, rewrite
from mesp.bundle.manifest import read_manifest
from mesp.bundle.reader import Bundle
from mesp.bundle.to_source_model import to_source_model
from mesp.errors import MespError
from mesp.models.layout import PAGE, block_layout
from mesp.models.quantization_formats import Quantization
from mesp.source_model.forward_pass import SideInputs

PARTS = ("weight", "scales", "biases")


@pytest.fixture(scope="session")
def exported(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("bundles") / "tiny.mesp"
    options = ("--data", "python-docs", "--seq-len", "16,32", *NEAREST)
    call("export", "--model", tiny, "--out", out, *options)
    return out


@pytest.fixture
def copy(exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "copy.mesp")

    def edit(**changes) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return folder, edit


def test_files_can_be_mapped(exported):
    manifest = read_manifest(exported)
    files = {entry.path: entry.size for entry in manifest.files}
    on_disk = {p.relative_to(exported).as_posix() for p in exported.rglob("*") if p.is_file()}
    assert on_disk == {*files, "manifest.json"}
    packed = {"blocks/02.bin": manifest.blocks[0], "embedding.bin": manifest.embedding}
    for name, entry in packed.items():
        assert files[name] == entry.layout.words * 4
        assert files[name] % PAGE == 0
        end = 0
        for array in entry.layout.arrays:
            assert array.offset % 16 == 0 and array.offset >= end
            end = array.offset + mx.zeros(array.shape, getattr(mx, array.dtype)).nbytes // 4
        assert end <= entry.layout.words
    keys = "format name model architecture quantization seq_lens "
    keys += "ranks blocks embedding head data end_tokens files"
    assert list(json.loads((exported / "manifest.json").read_text())) == keys.split()


MAMBA = ["mamba", "attention", "mamba", "mamba"]
LAYERS = {
    "granitemoehybrid": ["attention"] * 4,
    "granite-mamba": MAMBA,
    "granite-moe": MAMBA,
    "gemma4": ["sliding_attention", "full_attention"] * 2,
    "lfm2_moe": ["conv", "full_attention", "conv", "conv"],
    "lfm3": ["conv", "sliding_attention", "full_attention", "conv"],
}


@pytest.fixture(scope="session", params=FAMILIES)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    config = {**FAMILIES[request.param], "num_hidden_layers": 4, "no_rope_layers": None}
    config["layer_types"] = LAYERS.get(request.param)
    model = write_model(folder / "model", config)
    options = ("--seq-len", "4,9", "--rank", 2, "--group-size", 32, "--data", "python-docs")
    call(
        "export", "--model", model, "--out", folder / "out.mesp", *options, "--quantize", "nearest"
    )
    return config, Bundle(folder / "out.mesp")


def test_to_mlx_lm_is_the_quantized_model(family):
    config, bundle = family
    head = ("embed_tokens", "lm_head") if bundle.architecture.tie_word_embeddings else "lm_head"
    routers = {f".{name}" for block in bundle.architecture.blocks for name in block.frozen()}

    def quantization(path: str) -> Quantization:
        if path.endswith(tuple(routers)):
            return Quantization(8, 64)
        return Quantization(6 if path.endswith(head) else 4, 32)

    expected = mlx_lm_model(config, quantization)
    expected, found = (dict(tree_flatten(m.parameters())) for m in (expected, bundle.to_mlx_lm()))
    assert found.keys() == expected.keys()
    for name, array in found.items():
        # Gemma's checkpoints store norms minus 1. Computing 1 + w - 1 loses the last bits of w.
        close = mx.abs(array - expected[name]).max() <= (1e-7 if "norm" in name else 0)
        assert array.dtype == expected[name].dtype and close, name


def test_a_family_that_mlx_lm_lacks_is_named(tmp_path, monkeypatch):
    model = write_model(tmp_path / "model", FAMILIES["lfm3"])
    call("export", "--model", model, "--seq-len", 4, "--out", tmp_path / "out.mesp")
    monkeypatch.delitem(sys.modules, "mlx_lm.models.lfm3")
    with pytest.raises(MespError, match=r"mlx-lm cannot run lfm3 models.* adapters/peft"):
        Bundle(tmp_path / "out.mesp").to_mlx_lm()


def test_functions_give_the_logits_of_mlx_lm(family):
    config, bundle = family
    arch, model = bundle.architecture, bundle.to_mlx_lm()
    ignores_window = config["model_type"] in ("mistral", "phi3", "gemma2")
    for length in (4,) if ignores_window else (4, 9):
        tokens = mx.array(bundle.tokens("train")[:length])
        rows = {name: a[tokens] for name, a in bundle.embedding().items() if name != "norm"}
        x0 = x = arch.embedding_scale * reference.dequantize(rows, "", arch.hidden_size)[None]
        ours, shared = reference.Model.of(bundle), {}
        for i, block in enumerate(arch.blocks):
            lora = mx.zeros(block.lora_size(2))
            per_layer = reference.layer_input(ours, tokens, x0, i)
            given = [] if per_layer is None else [per_layer]
            given += shared.get(block.keys_of, ())
            if block.mlp.experts:  # a block with experts has no function
                with pytest.raises(MespError, match="mixes experts and has no function"):
                    bundle.function(length, i, plain=True)
                x = to_source_model(bundle).block(i, x, SideInputs(tokens.tolist(), x0))
                continue
            function = bundle.function(length, i, plain=True)
            x, *more = function(x, lora, mx.array(1.0), bundle.block_words(i), *given)
            if i in arch.owners:
                shared[i] = reference.shared_keys_and_values(more, lora, ours.blocks[i], block)
        head = bundle.head()
        x = reference.rms_norm(x, head["norm"], arch.rms_norm_eps)
        logits = x @ reference.dequantize(head, "", arch.hidden_size).T
        logits = reference.soft_cap(logits, arch.final_logit_softcapping)
        expected = model(tokens[None])
        assert mx.linalg.norm(logits - expected) <= 1e-5 * mx.linalg.norm(expected)


def test_adapters_load_into_mlx_lm(family, tmp_path):
    _, bundle = family
    arch, rank = bundle.architecture, 2
    lora = reference.init_lora(arch, rank, seed=1)
    lora = [w + 0.05 * mx.random.normal(w.shape, key=mx.random.key(i)) for i, w in enumerate(lora)]
    matrices = {}
    for i, flat in enumerate(lora):
        for name, (a, b) in reference.unpack_lora(flat, arch.blocks[i]).items():
            path = f"{arch.mlx_root}model.layers.{i}.{name}"
            matrices |= {f"{path}.lora_a": a, f"{path}.lora_b": b}
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), matrices)
    parameters = {"rank": rank, "scale": 3.0, "dropout": 0.0, "keys": arch.modules}
    config = {"num_layers": arch.num_hidden_layers, "lora_parameters": parameters}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))

    model = load_adapters(bundle.to_mlx_lm(), str(tmp_path))
    window = mx.array(bundle.tokens("train")[:5])
    ours = reference.loss(reference.Model.of(bundle), lora, window, 3.0)
    theirs, _ = default_loss(model, window[None], mx.array([[1, 4]]))
    assert abs(ours - theirs) <= 1e-5 * theirs
    with_none = reference.loss(reference.Model.of(bundle), [0 * w for w in lora], window, 3.0)
    assert abs(ours - with_none) > 1e-3


def test_blocks_are_grouped_by_layout_and_mixer(family):
    """For sequences shorter than the window of 5, blocks that differ only in the window have the
    same function.
    """
    config, bundle = family
    kinds = {
        "llama": [(0, 1, 3), (2,)] if config["layer_types"] else [(0, 1, 2, 3)],
        "smollm3": [(0, 1, 2), (3,)],
        "gemma2": [(0, 2), (1, 3)],
        "gemma3_text": [(0, 2), (1, 3)],
        "gemma3": [(0, 2), (1, 3)],
        "qwen3_5": [(0, 2), (1, 3)],
        "qwen3_5_moe": [(0, 2), (1, 3)],
        "lfm2": [(0, 2, 3), (1,)],
        "lfm2_moe": [(0,), (1,), (2, 3)],
        "qwen3_moe": [(0,), (1, 2, 3)],
        "lfm3": [(0, 3), (1,), (2,)],
        "gemma4": [(0,), (1,), (2,), (3,)],
    }
    expected = kinds.get(config["model_type"], [(0, 1, 2, 3)])
    if "mamba" in (config["layer_types"] or ()):
        expected = [(0, 2, 3), (1,)]
    assert [group.layers for group in bundle.manifest.blocks] == expected
    if len(expected) == 2 and not bundle.architecture.has_experts:
        first, second = bundle.manifest.blocks
        assert first.functions["9"] != second.functions["9"]
        # Gemma 3's layers with windows rotate with other frequencies than those without, and NoPE
        # layers do not rotate.
        same = config["model_type"] in ("llama", "gemma2")
        for functions in ("functions", "plain_functions"):
            files = [getattr(group, functions)["4"] for group in bundle.manifest.blocks]
            assert (files[0] == files[1]) == same
    listed = {file.path for file in bundle.manifest.files if ".mlxfn" in file.path}
    assert listed == bundle.function_files()


def test_what_belongs_to_an_expert_lies_together(family):
    _, bundle = family
    arch = bundle.architecture
    for dtype, group in itertools.product(("float32", "bfloat16"), bundle.manifest.blocks):
        block = arch.blocks[group.layers[0]]
        quantizations = {
            name: Quantization.of(group.layout, f"{name}.", columns)
            for name, (_, columns) in block.matrices().items()
        }
        layout = block_layout(block, quantizations, dtype)
        stacked = [spec for spec in layout.arrays if spec.stride is not None]
        names = [f"{name}.{part}" for name in block.stacked() for part in PARTS]
        assert [spec.name for spec in stacked] == names
        if not stacked:
            continue
        (stride,) = {spec.stride for spec in stacked}
        first, last = stacked[0].offset, stacked[-1].offset + stacked[-1].words
        assert stride - 16 < last - first <= stride
        assert all(spec.is_within(layout.words) for spec in layout.arrays)
        assert all(spec.shape[0] == block.num_experts for spec in stacked)
        others = [spec for spec in layout.arrays if spec.stride is None]
        assert max(spec.offset + spec.words for spec in others) <= first


def test_a_rank_above_those_of_the_matrices_is_refused(copy):
    folder, edit = copy
    edit(ranks=[2, 128])
    assert Bundle(folder).manifest.ranks == (2, 128)
    edit(ranks=[2, 129])
    with pytest.raises(MespError, match="has rank 129, and the model's matrices have at most rank"):
        Bundle(folder)


@pytest.mark.parametrize("stride", [-16, 0, 16, 1 << 40, "16", 1.5, None])
def test_a_damaged_stride_is_refused(tmp_path, stride):
    source, out = write_model(tmp_path / "model", FAMILIES["qwen3_moe"]), tmp_path / "out.mesp"
    export(source, out, seq_len=4, quantize="nearest")
    manifest = json.loads((out / "manifest.json").read_text())
    found = [array for group in manifest["blocks"] for array in group["arrays"]]
    next(array for array in found if "stride" in array)["stride"] = stride
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(MespError, match="damaged"):
        Bundle(out)


@pytest.mark.parametrize("version", ["0.31.1", "0.32.1", "0.33.0", "1.0", ""])
def test_an_mlx_of_another_layout_is_refused(exported, monkeypatch, version):
    """A phone can crash on files that such an MLX has written."""
    monkeypatch.setattr(mx, "__version__", version)
    said = rf"The layout of the functions of MLX '{version}' is not known; install mlx "
    with pytest.raises(MespError, match=said):
        Bundle(exported).function(16)
    with pytest.raises(MespError, match=said):
        rewrite(exported, exported.with_name("again.mesp"))
    assert not exported.with_name("again.mesp").exists()


def test_tokens(exported):
    bundle = Bundle(exported)
    for split, entry in bundle.manifest.data.items():
        tokens = bundle.tokens(split)
        assert len(tokens) == entry.tokens and tokens.max() < 512
    with pytest.raises(MespError, match="holds no test data"):
        bundle.tokens("test")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": 1}, "format 1"),
        ({"format": 5}, "format 5, .* write it again with mesp-export.$"),
        ({"format": 6}, "format 6, .* format 7; write it again with mesp-export --from .* --overw"),
    ],
)
def test_a_bundle_of_another_format_is_refused(copy, changes, named):
    folder, edit = copy
    edit(**changes)
    with pytest.raises(MespError, match=named):
        Bundle(folder)


@pytest.mark.parametrize(
    "layers",
    [[0, 1], [0, 1, 1, 2], [0, 1, 2, 3], [0, 1, 1]],
    ids=["one in no group", "one twice", "one too many", "one for another"],
)
def test_every_block_is_in_one_group(copy, layers):
    folder, edit = copy
    group = json.loads((folder / "manifest.json").read_text())["blocks"][0]
    edit(blocks=[{**group, "layers": layers}])
    with pytest.raises(MespError, match="is damaged"):
        Bundle(folder)


@pytest.mark.parametrize("name", ["shape", "dtype", "name", "lacking", "functions"])
def test_layouts_hold_the_arrays_of_the_architecture(copy, name):
    folder, edit = copy
    group = json.loads((folder / "manifest.json").read_text())["blocks"][0]
    array = next(a for a in group["arrays"] if a["name"] == "self_attn.o_proj.scales")
    if name == "functions":
        group["functions"].pop("16")
    elif name == "lacking":
        group["arrays"].remove(array)
    else:
        array[name] = {"shape": [128, 4], "dtype": "uint8", "name": "other"}[name]
    edit(blocks=[group])
    with pytest.raises(MespError, match="is damaged"):
        Bundle(folder)


@pytest.mark.parametrize("more", [-4, 4])
def test_data_has_the_size_of_its_arrays(copy, more):
    folder, edit = copy
    files = json.loads((folder / "manifest.json").read_text())["files"]
    (tokens,) = (file for file in files if file["path"] == "data/train.bin")
    data = (folder / "data" / "train.bin").read_bytes() + bytes(4)
    (folder / "data" / "train.bin").write_bytes(data[: tokens["size"] + more])
    tokens["size"] += more
    edit(files=files)
    with pytest.raises(MespError, match="is damaged"):
        Bundle(folder)


def test_a_file_that_is_missing_or_truncated_is_named(copy):
    folder, _ = copy
    file = folder / "blocks" / "00.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(MespError, match=r"00\.bin is .* bytes long, not"):
        Bundle(folder)
    file.unlink()
    with pytest.raises(MespError, match=r"00\.bin is missing"):
        Bundle(folder)


@pytest.mark.parametrize("manifest", ["", "{", "[]", "{}", '{"format": 7}'])
def test_damaged_manifest(tmp_path, manifest):
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(MespError, match=r"manifest\.json (cannot be read|is damaged); write"):
        Bundle(tmp_path)
