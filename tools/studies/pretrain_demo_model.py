"""Pretrains a tiny Qwen2.5-architecture model from plain text, as a Hugging Face folder.

It is small enough for the repository, and has every part of a real Qwen2.5 checkpoint
(grouped-query attention with QKV bias, SwiGLU, RMSNorm, rotary positions, tied embeddings, a
byte-level BPE tokenizer), so that the exporter and the app can be tried and tested without a
download.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.qwen2 import Model, ModelArgs
from rich.console import Console
from rich.progress import track

sys.path.append(str(Path(__file__).resolve().parents[1]))
from mesp.commands.command import Command
from mesp.errors import MespError
from studies.pretraining.model_folder import check_out, write_folder
from studies.pretraining.text import (
    END_OF_TEXT,
    encode,
    read_text,
    shuffled_batches,
    train_tokenizer,
)

HELD_OUT_FRACTION = 0.03
MAX_GRADIENT_NORM = 1.0


def mean_loss(model: Model, batch: mx.array) -> mx.array:
    logits = model(batch[:, :-1])
    return nn.losses.cross_entropy(logits, batch[:, 1:], reduction="mean")


def held_out_loss(model: Model, tokens: np.ndarray, batch_size: int, seq_len: int) -> float:
    rows = (len(tokens) - 1) // seq_len
    total = 0.0
    for first in range(0, rows, batch_size):
        starts = np.arange(first, min(first + batch_size, rows))[:, None] * seq_len
        batch = mx.array(tokens[starts + np.arange(seq_len + 1)])
        total += mean_loss(model, batch).item() * len(starts)
    return total / rows


def make_optimizer(steps: int, learning_rate: float, weight_decay: float) -> optim.MultiOptimizer:
    """Returns AdamW with a learning rate that warms up and then decays to a tenth along a cosine.
    Only weight matrices have weight decay."""
    warmup = max(1, min(200, steps // 10))
    schedule = optim.join_schedules(
        [
            optim.linear_schedule(learning_rate / warmup, learning_rate, warmup),
            optim.cosine_decay(learning_rate, max(1, steps - warmup), learning_rate / 10),
        ],
        [warmup],
    )

    def adamw(decay: float) -> optim.AdamW:
        return optim.AdamW(schedule, betas=[0.9, 0.98], weight_decay=decay, bias_correction=True)

    return optim.MultiOptimizer(
        [adamw(weight_decay), adamw(0.0)], [lambda _name, array: array.ndim == 2]
    )


def train(
    model: Model,
    batches: Iterator[mx.array],
    optimizer: optim.Optimizer,
    steps: int,
    evaluate_every: int,
    evaluate: Callable[[int], str],
) -> None:
    """Calls `evaluate(step)` every `evaluate_every` steps and after the last step, and shows its
    result.

    Raises MespError if the loss is not finite.
    """
    loss_and_grad = nn.value_and_grad(model, mean_loss)
    console = Console(stderr=True)
    for step in track(range(1, steps + 1), "Training", console=console):
        loss, gradient = loss_and_grad(model, next(batches))
        gradient, _ = optim.clip_grad_norm(gradient, MAX_GRADIENT_NORM)
        optimizer.update(model, gradient)
        mx.eval(model.parameters(), optimizer.state, loss)
        if not math.isfinite(loss.item()):
            raise MespError(f"The loss is not finite at step {step}.")
        if step % evaluate_every == 0 or step == steps:
            console.print(f"Step {step}: {evaluate(step)}")


@click.command(cls=Command)
@click.argument(
    "texts", nargs=-1, required=True, metavar="TEXT...",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)  # fmt: skip
@click.option(
    "--out", required=True, type=click.Path(path_type=Path),
    help="Model folder to write; a model already there is replaced.",
)  # fmt: skip
@click.option("--steps", type=click.IntRange(1), default=2000, help="Optimizer steps.")
@click.option("--batch-size", type=click.IntRange(1), default=8, help="Sequences a step.")
@click.option("--seq-len", type=click.IntRange(8, 1024), default=256, help="Tokens a sequence.")
@click.option(
    "--learning-rate", type=click.FloatRange(0, min_open=True), default=3e-3,
    help="Peak AdamW learning rate.",
)  # fmt: skip
@click.option(
    "--weight-decay", type=click.FloatRange(0), default=0.1,
    help="AdamW weight decay of the matrices.",
)  # fmt: skip
@click.option("--vocab-size", type=click.IntRange(320), default=2048, help="Tokenizer size.")
@click.option(
    "--evaluate-every", type=click.IntRange(1), default=100,
    help="Steps between measurements of the held-out loss.",
)  # fmt: skip
@click.option("--description", default="Plain English text.", help="The text, for the model card.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of weights and batches.")
def main(
    texts: tuple[Path, ...], out: Path, steps: int, batch_size: int, seq_len: int,
    learning_rate: float, weight_decay: float, vocab_size: int, evaluate_every: int,
    description: str, seed: int,
) -> None:  # fmt: skip
    """Pretrain a tiny Qwen2.5-architecture model on TEXT... and write it to a folder.

    The end of the text is held out. Whenever the loss there has fallen, the folder is written, so
    that it always holds the best model so far; interrupting the training keeps it.
    """
    if not math.isfinite(learning_rate + weight_decay):
        raise MespError("The learning rate and the weight decay must be finite numbers.")
    check_out(out)
    documents = [read_text(path) for path in texts]
    tokenizer = train_tokenizer(documents, vocab_size)
    tokens = encode(tokenizer, documents)
    held_out_count = max(int(len(tokens) * HELD_OUT_FRACTION), seq_len + 1)
    if len(tokens) - held_out_count <= 2 * seq_len:
        raise MespError(f"The text is too short: it has only {len(tokens)} tokens.")
    training, held_out = tokens[:-held_out_count], tokens[-held_out_count:]
    held_out_bytes = len(tokenizer.decode(held_out.tolist()).encode("utf-8"))
    bytes_per_token = held_out_bytes / held_out_count

    mx.random.seed(seed)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "eos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "hidden_act": "silu",
        "hidden_size": 192,
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "max_position_embeddings": 1024,
        "model_type": "qwen2",
        "num_attention_heads": 6,
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab_size,
    }
    model = Model(ModelArgs.from_dict(config))
    parameters = sum(w.size for _, w in tree_flatten(model.parameters()))
    click.echo(
        f"{parameters:,} parameters; {len(training):,} tokens to train on, {held_out_count:,} held "
        f"out; {bytes_per_token:.2f} bytes a token."
    )
    command = shlex.join(["python", "tools/studies/pretrain_demo_model.py", *sys.argv[1:]])
    best = math.inf

    def evaluate(step: int) -> str:
        nonlocal best
        loss = held_out_loss(model, held_out, batch_size, seq_len)
        summary = f"{loss:.3f} nats per token, {loss / bytes_per_token:.3f} nats per byte"
        if loss >= best:
            return f"held-out loss {summary}."
        best = loss
        loss_of = f"{summary} (step {step} of {steps})"
        facts = {"text": description, "loss": loss_of, "command": command}
        write_folder(out, model, tokenizer, config, facts)
        return f"held-out loss {summary}; saved."

    batches = shuffled_batches(training, batch_size, seq_len, seed)
    optimizer = make_optimizer(steps, learning_rate, weight_decay)
    train(model, batches, optimizer, steps, evaluate_every, evaluate)
    click.echo(f"Wrote {out}; best held-out loss {best:.3f} nats per token.")


if __name__ == "__main__":
    main()
