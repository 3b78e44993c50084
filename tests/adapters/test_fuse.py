import json
import re
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import gguf
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import load_adapters

from helpers.adapters import RANK, SCALE, exported, write_adapters
from helpers.commands import call, refused, run
from helpers.derivatives import relative_error
from helpers.gguf_files import INTERLEAVED
from helpers.mlx_models import with_few_values
from helpers.models import FAMILIES, random_tensors, text_of, write_model
from mesp import reference
from mesp.adapters.load import read_adapters
from mesp.bundle.reader import Bundle

TO_GGUF = ("qwen3", "llama", "gemma2", "phi3", "smollm3", "lfm2", "granite", "minicpm")


@pytest.fixture(scope="module", params=[*TO_GGUF, "gemma3"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return with_adapters(request.param, tmp_path_factory.mktemp(request.param))


def with_adapters(name: str, folder: Path) -> tuple[Path, Path]:
    bundle = exported(folder, FAMILIES[name])
    return bundle, write_adapters(folder / "adapters", bundle)


def fuse(bundle: Path, adapters: Path, out: Path, *options: object):
    return run("fuse", bundle, "--adapters", adapters, "--out", out, *options)


def logits(model, tokens: mx.array) -> mx.array:
    model.set_dtype(mx.float32)
    return model(tokens[None])


def tuned(bundle: Path, adapters: Path) -> tuple[mx.array, mx.array, mx.array]:
    opened = Bundle(bundle)
    tokens = mx.array(opened.tokens("train")[:4])
    expected = logits(load_adapters(opened.to_mlx_lm(), str(adapters)), tokens)
    return tokens, logits(opened.to_mlx_lm(), tokens), expected


@pytest.mark.parametrize(("bits", "tolerance"), [("bfloat16", 0.02), ("8", 0.05), ("4", 0.45)])
def test_the_fused_model_is_the_one_with_adapters(family, tmp_path, bits, tolerance):
    """The fused model differs from the model with adapters only by the rounding of its weights: to
    8 bits of mantissa in bfloat16, or to 1/255 or 1/15 of a group's range.

    The three roundings change the logits by up to 0.9%, 2.8% and 38%. The adapters change them by
    78% and more.
    """
    bundle, adapters = family
    done = fuse(bundle, adapters, tmp_path / "fused", "--bits", bits, "--val-batches", 2)
    assert done.returncode == 0, done.stderr
    fused, _ = mlx_lm.load(str(tmp_path / "fused"))
    tokens, base, expected = tuned(bundle, adapters)
    assert relative_error(logits(fused, tokens), expected) <= tolerance
    assert relative_error(base, expected) > 0.5
    quantized = {name for name, _ in tree_flatten(fused.parameters()) if name.endswith(".scales")}
    assert bool(quantized) == (bits != "bfloat16")


@pytest.mark.parametrize("bits", [1, 2])
def test_a_fused_model_of_few_bits_says_what_it_has(tmp_path, bits):
    config = FAMILIES["qwen3"] | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    tensors = with_few_values(random_tensors(config), bits, 128)
    config["quantization"] = {"bits": bits, "group_size": 128}
    model, bundle = write_model(tmp_path / "model", config, tensors), tmp_path / "bundle.mesp"
    size = ("--seq-len", 8, "--rank", RANK, "--data", "python-docs")
    call("export", "--model", model, "--out", bundle, *size)
    adapters = write_adapters(tmp_path / "adapters", bundle)
    tokens, _, expected = tuned(bundle, adapters)
    for width, said, tolerance in (
        ("8", "14 of 2 bits in groups of 128 now have 8 bits in groups of 64; the other matrices "
            "keep their codes, with scales in bfloat16.", 0.05),
        ("bfloat16", "No matrix is quantized any more: they had 2 bits in groups of 128.", 0.02),
    ):  # fmt: skip
        done = fuse(bundle, adapters, tmp_path / width, "--bits", width, "--val-batches", 0)
        assert said in done.stdout, done
        fused, _ = mlx_lm.load(str(tmp_path / width))
        assert relative_error(logits(fused, tokens), expected) <= tolerance
    again = tmp_path / "again.mesp"
    call("export", "--model", tmp_path / "8", "--out", again, "--seq-len", 8)
    whole = Bundle(again).to_mlx_lm()
    assert relative_error(logits(whole, tokens), expected) <= 0.05


def test_layers_without_adapters_stay_as_they_are(family, tmp_path):
    bundle, adapters = family
    assert fuse(bundle, adapters, tmp_path / "fused", "--bits", 8).returncode == 0
    fused, _ = mlx_lm.load(str(tmp_path / "fused"))
    weight = text_of(fused).model.embed_tokens.weight
    assert mx.array_equal(weight, Bundle(bundle).embedding()["weight"])


@pytest.mark.parametrize(("bits", "tolerance"), [("bfloat16", 0.02), ("8", 0.05)])
def test_experts_are_fused(tmp_path, bits, tolerance):
    bundle, adapters = with_adapters("lfm2_moe", tmp_path)
    matrices = mx.load(str(adapters / "adapters.safetensors"))
    experts = {name: array for name, array in matrices.items() if "switch_mlp" in name}
    assert len(experts) == 2 * 3
    mx.save_safetensors(str(adapters / "adapters.safetensors"), experts)
    assert fuse(bundle, adapters, tmp_path / "fused", "--bits", bits).returncode == 0
    fused, _ = mlx_lm.load(str(tmp_path / "fused"))
    tokens, base, expected = tuned(bundle, adapters)
    assert relative_error(logits(fused, tokens), expected) <= tolerance
    assert relative_error(base, expected) > 0.1


def test_a_text_of_several_modalities_is_fused_by_its_place_there(tmp_path):
    """`A_log` stays float32, as in mlx-lm."""
    bundle, adapters = with_adapters("qwen3_5", tmp_path)
    assert fuse(bundle, adapters, tmp_path / "fused", "--bits", "bfloat16").returncode == 0
    fused = dict(tree_flatten(mlx_lm.load(str(tmp_path / "fused"))[0].parameters()))
    model = load_adapters(Bundle(bundle).to_mlx_lm(), str(adapters))
    prefix = "language_model.model.layers.0.linear_attn"
    decays = dict(tree_flatten(model.parameters()))[f"{prefix}.A_log"]
    assert mx.array_equal(fused[f"{prefix}.A_log"], decays)
    assert decays.dtype == fused[f"{prefix}.A_log"].dtype == mx.float32
    for path, layer in model.named_modules():
        if isinstance(layer, LoRALinear):
            whole = layer.fuse(dequantize=True).weight.astype(mx.bfloat16)
            assert mx.array_equal(fused[f"{path}.weight"], whole), path
    assert any(path.endswith("in_proj_b.weight") for path in fused)


def test_the_losses_are_said(family, tmp_path):
    bundle, adapters = family
    done = fuse(bundle, adapters, tmp_path / "fused", "--bits", "bfloat16", "--val-batches", 3)
    words = done.stdout.splitlines()[0].replace(",", "").split()
    base, tuned, fused = (float(words[i]) for i in (2, 3, 6))
    assert tuned == pytest.approx(fused, abs=0.03) and abs(base - tuned) > 0.001
    opened = Bundle(bundle)
    model = reference.Model.of(opened)
    none = [mx.zeros(block.lora_size(RANK)) for block in opened.architecture.blocks]
    # mlx-lm ignores the sliding window of these models
    ignores_window = opened.architecture.model_type in ("gemma2", "phi3")
    if not ignores_window:
        windows = [mx.array(opened.tokens("valid")[8 * i : 8 * i + 9]) for i in range(3)]
        expected = np.mean([reference.loss(model, none, each, SCALE) for each in windows])
        assert base == pytest.approx(expected, abs=1e-3)


def test_quantizing_that_eats_the_adapters_is_told(tmp_path):
    bundle = tmp_path / "demo.mesp"
    assert run("export", "--model", "demo", "--seq-len", 32, "--out", bundle).returncode == 0
    call("train", bundle, "--steps", 10, "--learning-rate", 8e-5, "--val-batches", 0,
               "--out", tmp_path / "run")  # fmt: skip
    adapters = tmp_path / "run" / "adapters"
    four = fuse(bundle, adapters, tmp_path / "four", "--bits", 4, "--val-batches", 8)
    assert "Quantizing to 4 bits has lost" in four.stdout, four.stdout
    eight = fuse(bundle, adapters, tmp_path / "eight", "--bits", 8, "--val-batches", 8)
    assert "has lost" not in eight.stdout, eight.stdout


def test_the_terms_of_the_model_are_beside_what_is_written(tmp_path):
    model = write_model(tmp_path / "model", FAMILIES["qwen3"])
    texts = {"LICENSE.txt": "You may.", "Notice": "They made it.", "USE_POLICY.md": "Do no harm."}
    for name, text in texts.items():
        (model / name).write_text(text)
    (model / "README.md").write_text("---\nlicense: other\nlicense_name: own\n---\n# A model\n")
    bundle = tmp_path / "bundle.mesp"
    call("export", "--model", model, "--out", bundle, "--seq-len", 8, "--rank", RANK)
    adapters = write_adapters(tmp_path / "adapters", bundle)
    out = tmp_path / "fused"
    assert fuse(bundle, adapters, out, "--gguf", "--val-batches", 0).returncode == 0
    fields = gguf.GGUFReader(out / "adapters.gguf").fields
    licence = ("general.license", "general.license.name")
    assert [fields[key].contents() for key in licence] == ["other", "own"]
    assert "general.license.link" not in fields
    assert {name: (out / name).read_text() for name in texts} == texts
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlicense: other\nlicense_name: own\n---\n")


def test_gguf_adapters_are_as_llama_cpp_names_them(family, tmp_path):
    bundle, adapters = family
    done = fuse(bundle, adapters, tmp_path / "fused", "--gguf", "--val-batches", 0)
    if (family_name := Bundle(bundle).architecture.model_type) not in TO_GGUF:
        assert done.returncode == 2
        assert f"Adapters of {family_name} cannot be written for llama.cpp" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    reader = gguf.GGUFReader(tmp_path / "fused" / "adapters.gguf")

    def field(name: str) -> object:
        return reader.get_field(name).contents()

    arch = Bundle(bundle).architecture
    assert (field("general.type"), field("adapter.type")) == ("adapter", "lora")
    assert field("general.architecture") == arch.model_type
    assert field("adapter.lora.alpha") == SCALE * RANK
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    ours = read_adapters(adapters, arch).matrices
    assert len(tensors) == 2 * len(ours)
    if arch.model_type == "lfm2":
        assert "blk.0.shortconv.in_proj.weight.lora_a" in tensors
        return
    down = ours["model.layers.1.mlp.down_proj"]
    assert np.array_equal(tensors["blk.1.ffn_down.weight.lora_a"], np.array(down[0]).T)
    assert np.array_equal(tensors["blk.1.ffn_down.weight.lora_b"], np.array(down[1]).T)
    if "self_attn.q_proj" not in arch.modules:
        assert "blk.0.attn_qkv.weight.lora_a" in tensors and "blk.0.ffn_up.weight.lora_b" in tensors
        return
    b = np.array(ours["model.layers.0.self_attn.q_proj"][1]).T
    size = arch.mixers[0].head_dim
    heads = b.reshape(arch.mixers[0].num_attention_heads, size, RANK)
    if arch.model_type in INTERLEAVED:
        # MeSP rotates halves of a head; llama.cpp rotates pairs of neighbours
        pairs = [i // 2 + (size // 2) * (i % 2) for i in range(size)]
        heads = heads[:, pairs]
    assert np.array_equal(tensors["blk.0.attn_q.weight.lora_b"], heads.reshape(b.shape))


def test_gguf_adapters_of_mamba_2(tmp_path):
    bundle, adapters = with_adapters("granite-mamba", tmp_path)
    done = fuse(bundle, adapters, tmp_path / "fused", "--gguf", "--val-batches", 0)
    assert done.returncode == 0, done.stderr
    reader = gguf.GGUFReader(tmp_path / "fused" / "adapters.gguf")
    assert reader.get_field("general.architecture").contents() == "granitehybrid"
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    ours = read_adapters(adapters, Bundle(bundle).architecture).matrices
    for name, theirs in (("in_proj", "ssm_in"), ("out_proj", "ssm_out")):
        for matrix, array in zip("ab", ours[f"model.layers.0.mamba.{name}"], strict=True):
            assert np.array_equal(
                tensors[f"blk.0.{theirs}.weight.lora_{matrix}"], np.array(array).T
            )


@pytest.mark.parametrize("what", ["another model", "no adapters", "no B", "taken"])
def test_bad_input_is_one_sentence_and_nothing_is_left(family, tmp_path, what):
    bundle, adapters = family
    mine = shutil.copytree(adapters, tmp_path / "adapters")
    out = tmp_path / "fused"
    said = {
        "another model": "has the shape [",
        "no adapters": "it has no adapter_config.json",
        "no B": "lora_b is missing",
        "taken": "exists; name another --out",
    }[what]
    matrices = mx.load(str(mine / "adapters.safetensors"))
    if what == "another model":
        matrices = {name: mx.concatenate([m, m], 0) for name, m in matrices.items()}
        mx.save_safetensors(str(mine / "adapters.safetensors"), matrices)
    elif what == "no adapters":
        (mine / "adapter_config.json").unlink()
    elif what == "no B":
        name = next(name for name in matrices if name.endswith("lora_b"))
        mx.save_safetensors(
            str(mine / "adapters.safetensors"), {n: m for n, m in matrices.items() if n != name}
        )
    else:
        out.mkdir()
    done = fuse(bundle, mine, out)
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"adapters", *(["fused"] * out.exists())}


KINDS = {"quantized": (), "bfloat16": ("--bits", "bfloat16"), "gguf": ("--gguf",)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_is_one_sentence_wherever_it_is_full(kind: str, tmp_path: Path):
    bundle, adapters = with_adapters("qwen3", tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert fuse(bundle, adapters, tmp_path / "whole", *KINDS[kind]).returncode == 0
    sizes = [path.stat().st_size for path in (tmp_path / "whole").iterdir()]
    shutil.rmtree(tmp_path / "whole")
    for limit in sorted({size // part for size in sizes for part in (1, 2, 9)} - {max(sizes)}):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
        try:
            done = fuse(bundle, adapters, tmp_path / "fused", *KINDS[kind])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert refused(done).endswith("the disk is full; free some space and try again."), limit
        assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("kind", KINDS)
def test_the_disk_is_asked_first(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bundle, adapters = with_adapters("qwen3", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000))
    monkeypatch.setattr(mx, "save_safetensors", lambda *_, **__: pytest.fail("it is written"))
    said = refused(fuse(bundle, adapters, tmp_path / "fused", *KINDS[kind]))
    assert said.startswith(f"Cannot write {tmp_path / 'fused'}: it takes 1 MB, and its disk has 0")


CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_fused_base_model_stops_where_its_data_ended(tmp_path):
    """A fused model stops at the token that ends the answers in its data."""
    model = write_model(tmp_path / "model", FAMILIES["qwen3"])
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    end = {**tokenizer["added_tokens"][0], "id": 305, "content": "<|im_end|>", "special": True}
    tokenizer["added_tokens"].append(end)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "chat_template.jinja").write_text(CHATML)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    bundle = tmp_path / "bundle.mesp"
    size = ("--seq-len", 64, "--rank", RANK, "--group-size", 32, "--data", data)
    call("export", "--model", model, "--out", bundle, *size)
    adapters = write_adapters(tmp_path / "adapters", bundle)
    assert fuse(bundle, adapters, tmp_path / "fused", "--val-batches", 0).returncode == 0
    _, fused = mlx_lm.load(str(tmp_path / "fused"))
    ends = {fused.convert_tokens_to_ids("<|im_end|>"), fused.eos_token_id}
    assert fused.eos_token_ids == ends
    assert len(fused.eos_token_ids) == 2


def test_its_losses_are_a_runs_on_as_many_sequences(tmp_path: Path):
    bundle, out = tmp_path / "demo.mesp", tmp_path / "run"
    exported = call("export", "--model", "demo", "--seq-len", 64, "--out", bundle)
    assert "Record 1 of 1: 65 tokens, 64 in the loss\n" in exported.stdout
    trained = call("train", bundle, "--steps", 2, "--val-batches", 25, "--out", out).stdout
    (losses,) = re.findall(r"Held-out loss (.*) before, (.*) after", trained)
    options = ("--adapters", out / "adapters", "--out")
    same = call("fuse", bundle, *options, tmp_path / "same", "--val-batches", 25).stdout
    assert re.findall(r"Held-out loss (.*), (.*) with adapters", same) == [losses]
    assert "These losses" not in same
    fewer = call("fuse", bundle, *options, tmp_path / "fewer").stdout
    assert re.findall(r"Held-out loss (.*), (.*) with adapters", fewer) != [losses]
    assert (
        "\nThese losses are of the first 8 held-out sequences, and a run's of 25 by default; "
        "--val-batches takes as many.\n"
    ) in fewer
