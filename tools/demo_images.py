"""The program of `make demo-images`: teaches a tiny model whose things are in drawn pictures.

No model with a vision tower is on PyPI. So a model of 2 text blocks and a tower of 2 layers learns
colours and shapes first, by automatic differentiation of mlx-vlm's SmolVLM. Then MeSP teaches it
whose a thing is, which it sees by the colour.
"""

import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
from mlx import nn, optimizers
from mlx.utils import tree_flatten
from mlx_vlm import utils
from PIL import Image, ImageDraw
from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from demo import TOOLS, WIDTH, call, evaluate, new_run, program, right, shown, write_data
from helpers.vision_models import write_vision_model
from mesp.commands.command import Command
from mesp.formatting import megabytes
from mesp.runs.log import RunLog

OUT = TOOLS.parent / "build" / "demo-images"
SIDE = 32  # pixels
COLORS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220)}
OWNERS = {"red": "Anna", "green": "Ben", "blue": "Clara"}
SHAPES = ("circle", "square", "triangle")
PRETRAINING = 400  # steps of 16 pictures
PICTURES = 20
HELD_OUT = 30
STEPS = 200


def draw(pick: random.Random, color: str, shape: str) -> Image.Image:
    image = Image.new("RGB", (SIDE, SIDE), "white")
    x, y, size = pick.randint(2, 10), pick.randint(2, 10), pick.randint(14, 20)
    shade = tuple(min(255, max(0, each + pick.randint(-20, 20))) for each in COLORS[color])
    pencil, box = ImageDraw.Draw(image), (x, y, x + size, y + size)
    if shape == "circle":
        pencil.ellipse(box, fill=shade)
    elif shape == "square":
        pencil.rectangle(box, fill=shade)
    else:
        pencil.polygon([(x, y + size), (x + size // 2, y), box[2:]], fill=shade)
    return image


def write_model(folder: Path) -> None:
    """Writes a model that says what is in a picture, in the form that mlx-vlm writes."""
    write_vision_model(folder, "smolvlm")
    settings = folder / "preprocessor_config.json"
    one_tile = json.loads(settings.read_text()) | {"do_image_splitting": False}
    settings.write_text(json.dumps(one_tile))
    model = utils.load_model(folder)
    processor = utils.load_processor(folder, add_detokenizer=False, trust_remote_code=False)
    pick, update = random.Random(0), optimizers.AdamW(2e-3)

    def loss(model: nn.Module, batch: dict[str, mx.array], mask: mx.array) -> mx.array:
        found = model(**batch)
        losses = nn.losses.cross_entropy(found.logits[:, :-1], batch["input_ids"][:, 1:])
        return (losses * mask).sum() / mask.sum()

    def example() -> tuple[list[int], mx.array, int]:
        """Returns the ids of a conversation, its pixels, and where its answer begins."""
        color, shape = pick.choice([*COLORS]), pick.choice(SHAPES)
        content = [{"type": "image"}, {"type": "text", "text": "What?"}]
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        said = [{"type": "text", "text": f"a {color} {shape}"}]
        both = [messages, [*messages, {"role": "assistant", "content": said}]]
        asked, whole = (
            processor.tokenizer.apply_chat_template(each, tokenize=False) for each in both
        )
        batch = utils.prepare_inputs(processor, images=[draw(pick, color, shape)], prompts=whole)
        ids = batch["input_ids"][0].tolist()
        answer = processor.tokenizer.encode(whole[len(asked) :], add_special_tokens=False)
        return ids, batch["pixel_values"][0], len(ids) - len(answer)

    gradient = nn.value_and_grad(model, loss)
    for _ in range(PRETRAINING):
        examples = [example() for _ in range(16)]
        longest = max(len(ids) for ids, *_ in examples)
        ids = mx.array([ids + [0] * (longest - len(ids)) for ids, *_ in examples])
        mask = mx.array(
            [[first <= at < len(ids) for at in range(1, longest)] for ids, _, first in examples]
        )
        batch = {"input_ids": ids, "pixel_values": mx.stack([each for _, each, _ in examples])}
        _, gradients = gradient(model, batch, mask)
        update.update(model, gradients)
        mx.eval(model.parameters(), update.state)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def records(folder: Path, count: int, seed: int) -> list[dict[str, Any]]:
    pick, found = random.Random(seed), []
    for number in range(count):
        color, shape = pick.choice([*COLORS]), pick.choice(SHAPES)
        file = f"{seed}-{number}.png"
        draw(pick, color, shape).save(folder / file)
        found.append({"prompt": "Whose?", "completion": f"{OWNERS[color]}'s", "image": file})
    return found


@click.command(cls=Command)
def main() -> None:
    """Teach a tiny model whose things are in drawn pictures, and show what it has learned."""
    model, bundle, data = OUT / "model", OUT / "pictures.mesp", OUT / "pictures"
    if not (OUT / "is-trained").exists():
        shutil.rmtree(OUT, ignore_errors=True)
        with Console(stderr=True).status("A tiny model learns colours and shapes"):
            write_model(model)
        (OUT / "is-trained").touch()
    began = time.monotonic()
    data.mkdir(exist_ok=True)
    held_out = records(data, HELD_OUT, seed=1)
    write_data(data, train=records(data, PICTURES, seed=0), valid=held_out)
    call(
        *(program("mesp-export"), "--model", model, "--data", data, "--out", bundle),
        *("--overwrite", "--seq-len", 64, "--bits", 8),
    )
    run = new_run(OUT)
    call(
        *(program("mesp-train"), bundle, "--steps", STEPS, "--batch-size", 4, "--out", run),
        *("--learning-rate", 3e-3, "--schedule", "linear", "--val-batches", HELD_OUT),
    )
    before, after = evaluate(bundle, data, [run], "--max-tokens", 12, "--vision", model)
    console, result = Console(width=WIDTH, highlight=False), RunLog.load(run)
    for case, old, new in zip(held_out[:6], before, after, strict=False):
        console.print(shown(f"{case['image']}: {case['completion']}", old, new))
    console.print(
        f"\nOf {PICTURES} pictures it learned to say of {HELD_OUT} others whose they are: "
        f"{right(before)} right before, {right(after)} after, in {time.monotonic() - began:.0f} s "
        f"and {megabytes(result.peak_bytes)} MB.",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
