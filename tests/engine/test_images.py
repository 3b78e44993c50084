import base64
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed: pip install 'mesp[vision]'")

from mlx.utils import tree_flatten
from mlx_vlm import utils
from PIL import Image

from helpers.commands import call, run
from helpers.oracle import Oracle, Recipe, distance, saved
from helpers.vision_models import FAMILIES, picture, write_vision_model
from mesp import reference
from mesp.bundle.reader import Bundle
from mesp.runs.log import RunLog
from mesp.vision import VisionTower

LENGTH = 256
RATE = 0.01  # more makes these models, whose losses are 40, diverge
PARTS = ("q", "k", "v", "o", "gate", "up", "down", "in", "out", "w1", "w2", "w3", "out_proj")
families = pytest.mark.parametrize("family", FAMILIES)


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def asked(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*content]}


def answered(words: str) -> dict[str, Any]:
    return {"role": "assistant", "content": words}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Records in all the forms in which people have images."""
    for name, size in {"a": (20, 24), "b": (60, 40), "c": (31, 40)}.items():
        (tmp_path / f"{name}.png").write_bytes(picture(*size, seed=ord(name)))
    url = "data:image/png;base64," + base64.b64encode((tmp_path / "c.png").read_bytes()).decode()
    a = {"type": "image", "image": "a.png"}
    records: list[dict[str, Any]] = [
        {"messages": [asked(a, text("What is it?")), answered("A fox.")]},
        {
            "messages": [
                asked(text("One: "), {"type": "image", "path": "b.png"}, text(" two: "), a),
                answered("A dog."),
                asked(text("And now?")),
                answered("A fox, and a dog."),
            ]
        },
        {"messages": [asked({"type": "image"}, text("Which?")), answered("Lazy.")],
         "images": ["b.png"]},
        {"messages": [asked(text("No image.")), answered("None.")]},
        {"prompt": "What do you see?", "completion": "A quick fox.", "image": "c.png"},
        {"messages": [
            asked({"type": "image_url", "image_url": {"url": url}}), answered("Brown.")]},
    ]  # fmt: skip
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def export(model: Path, data: Path, *options: object) -> Bundle:
    bundle = model.with_suffix(".mesp")
    call(
        "export", "--model", model, "--data", data, "--out", bundle, "--seq-len", LENGTH,
        "--hold-out", 0, "--bits", 8, *options,
    )  # fmt: skip
    return Bundle(bundle)


@families
@pytest.mark.parametrize("pack", [False, True])
def test_steps_are_those_of_automatic_differentiation(
    family: str, pack: bool, data: Path, tmp_path: Path, fast_oracle: None
):
    model = write_vision_model(tmp_path / "model", family)
    bundle = export(model, data, "--pack" if pack else "--no-pack")
    oracle = Oracle.of(bundle.path, LENGTH)
    expected = oracle.train(Recipe(optim.SGD(RATE), projections=PARTS), steps=6)
    moved = distance(expected.start, expected.end)
    ways: list[tuple[str, ...]] = [(), ("--offload", "all")]
    for options in ways if pack else [*ways, ("--method", "mebp")]:
        out = tmp_path / "-".join(("run", *options))
        call(
            "train", bundle.path, "--out", out, "--steps", 6, "--optimizer", "sgd",
            "--learning-rate", RATE, "--batch-size", 1, *options,
        )  # fmt: skip
        assert RunLog.load(out).losses == pytest.approx(expected.losses, rel=1e-5)
        assert distance(saved(out), expected.end) < 1e-4 * moved


@families
def test_tokens_and_rows_are_those_of_mlx_vlm(family: str, data: Path, tmp_path: Path):
    model = write_vision_model(tmp_path / "model", family)
    bundle = export(model, data, "--loss-on", "all")
    tower, (whole, processor) = VisionTower.open(model), utils.load(str(model))
    rows, places = bundle.images("train")
    (start, length), tokens = bundle.examples("train")[1], bundle.tokens("train")
    messages = json.loads(data.read_text().splitlines()[1])["messages"]
    for message in messages:
        content = message["content"]
        parts = [text(content)] if isinstance(content, str) else content
        message["content"] = [
            each if each["type"] == "text" else {"type": "image"} for each in parts
        ]
    prompt = processor.tokenizer.apply_chat_template(messages, tokenize=False)
    images = [Image.open(data.with_name(name)) for name in ("b.png", "a.png")]
    inputs = utils.prepare_inputs(processor, images=images, prompts=prompt)
    ids = tokens[start : start + length].tolist()
    assert ids == inputs["input_ids"][0].tolist()
    is_image = np.array(ids) == tower.image_token_id
    own = places[start : start + length].astype(np.int64)
    assert (is_image == (own > 0)).all()
    found = rows[mx.array(own[is_image] - 1)]
    merged = whole.get_input_embeddings(**inputs).inputs_embeds[0]
    assert mx.allclose(found, merged[mx.array(np.flatnonzero(is_image))], rtol=1e-5, atol=1e-5)
    of_images = [tower.features(data.with_name(f"{name}.png")).rows.shape[0] for name in "abc"]
    assert rows.shape[0] == sum(of_images)  # equal images share rows
    mask = bundle.mask("train")
    assert not mask[places > 0].any() and mask[places == 0].sum() > len(ids) / 2


REFUSED = {
    "no file": ([asked({"type": "image", "image": "none.png"}), answered("A.")], "none.png"),
    "a page": ([asked({"type": "image", "image": "https://a.b/c.png"}), answered("A.")], "save it"),
    "no image": ([asked({"type": "image"}), answered("A.")], "save it"),
    "an answer": ([asked(text("Draw.")), {"role": "assistant", "content": [
        {"type": "image", "image": "a.png"}, text("So.")]}], "of the assistant with an image"),
    "the token": ([asked({"type": "image", "image": "a.png"}, text("<image>")), answered("A.")],
                  "2 times <image>"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_an_image_is_refused(case: str, data: Path, tmp_path: Path):
    messages, said = REFUSED[case]
    data.write_text(json.dumps({"messages": messages}) + "\n")
    model = write_vision_model(tmp_path / "model", "smolvlm")
    options = ("--data", data, "--hold-out", 0, "--out", tmp_path / "b.mesp")
    done = run("export", "--model", model, *options)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert not (tmp_path / "b.mesp").exists()


def test_what_takes_no_images_says_so(data: Path, tmp_path: Path):
    def refused(said: str, *line: object) -> None:
        done = run(*line)
        assert done.returncode == 2 and said in done.stderr, done.stderr

    model = write_vision_model(tmp_path / "model", "smolvlm")
    bundle = export(model, data).path
    refused("give the data to mesp-export", "data", bundle, "--data", data)
    pair = {"prompt": [asked({"type": "image", "image": "a.png"})],
            "chosen": [answered("A.")], "rejected": [answered("B.")]}  # fmt: skip
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    refused(
        "a pair of answers cannot have", "export", "--model", model,
        "--data", tmp_path / "pairs.jsonl", "--out", tmp_path / "p.mesp",
    )  # fmt: skip
    refused(
        "Only models of the types", "export", "--model", "demo", "--data", data,
        "--out", tmp_path / "d.mesp",
    )  # fmt: skip


@families
def test_adapters_load_in_mlx_vlm(family: str, data: Path, tmp_path: Path):
    model = write_vision_model(tmp_path / "model", family)
    out = tmp_path / "run"
    call("train", export(model, data).path, "--out", out, "--steps", 2, "--batch-size", 1)
    adapted, _ = utils.load(str(model), adapter_path=str(out / "adapters"))
    parameters = dict(tree_flatten(adapted.parameters()))
    adapters = mx.load(str(out / "adapters" / "adapters.safetensors"))
    assert all(mx.array_equal(parameters[name], each) for name, each in adapters.items())


@families
def test_answers_are_those_of_mlx_lm_with_mlx_vlms_rows(family: str, data: Path, tmp_path: Path):
    model = write_vision_model(tmp_path / "model", family)
    bundle, out = export(model, data), tmp_path / "figures.json"
    processor = utils.load(str(model))[1]
    image = data.with_name("b.png")
    messages = [asked({"type": "image"}, text("Which?"))]
    prompt = processor.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    inputs = utils.prepare_inputs(processor, images=[Image.open(image)], prompts=prompt)
    rows = VisionTower.open(model).features(image).rows
    of_text = reference.Model.of(bundle)
    ids = inputs["input_ids"][0].tolist()
    lora = reference.init_lora(bundle.architecture, 8, 0)
    token, expected = VisionTower.open(model).image_token_id, []
    for _ in range(8):
        is_row = np.array(ids) == token
        places = mx.array(np.where(is_row, np.cumsum(is_row), 0))
        hidden, _ = reference.forward(of_text, lora, mx.array(ids), 2.0, images=(rows, places))
        logits = reference.logits(hidden[-1], of_text.head, bundle.architecture)
        ids.append(mx.argmax(logits[0, -1]).item())
        expected.append(ids[-1])
    wanted = processor.tokenizer.decode(expected)
    vision = ("--vision", model)
    written = call(
        "generate", bundle.path, "--prompt", "Which?", "--image", image, "--max-tokens", 8, *vision
    )
    assert written.stdout.removesuffix("\n") == wanted
    call("evaluate", bundle.path, data, "--max-tokens", 8, "--out", out, "--at-once", 3, *vision)
    samples = json.loads(out.read_text())["samples"][0]
    assert samples[2]["written"] == wanted
    done = run("evaluate", bundle.path, data)
    assert done.returncode == 2 and "--vision" in done.stderr
