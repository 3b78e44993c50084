"""Checks that a real checkpoint trains as in mlx-lm.

Exits with an error if training does not lower the loss, or if one of mlx-lm's losses differs from
the trainer's by more than TOLERANCE.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import click
import mlx.core as mx
import mlx_lm
from mlx_lm.tuner.utils import load_adapters

from mesp.adapters.held_out_loss import measure_held_out_loss
from mesp.bundle.reader import Bundle
from mesp.commands.command import Command
from mesp.runs.log import RunLog
from mesp.source_model.find import find_source

ROOT = Path(__file__).resolve().parents[1]
STEPS = 20
SEQ_LEN = 64
VAL_BATCHES = 8
GROUP_SIZE, BITS = 64, 4
# The maximum difference of the trainer's and mlx-lm's losses, in nats per token. They add numbers
# in different orders.
TOLERANCE = 2e-3


@click.command(cls=Command)
@click.option("--model", required=True, metavar="HUB_ID|DIR|demo")
@click.option("--learning-rate", default=2e-4, show_default=True, help="Of AdamW.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Replaced if there.")
def main(model: str, learning_rate: float, out: Path) -> None:
    mx.set_default_device(mx.cpu)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    bundle, run = out / "model.mesp", out / "run"
    export = ["--model", model, "--out", bundle, "--seq-len", SEQ_LEN]
    export += ["--bits", BITS, "--group-size", GROUP_SIZE]
    export += ["--quantize", "nearest", "--head-bits", BITS]
    source = find_source(model, random_weights=False)
    if "model_file" in source.config:
        raise click.ClickException(f"{model} is Python code, which mlx-lm would run; name another.")
    if model != "demo":
        text = out / "text.txt"
        pages = sorted((ROOT / "docs").glob("*.md"))
        text.write_text("\n".join(page.read_text("utf-8") for page in pages), "utf-8")
        export += ["--data", text]
    command("mesp.commands.export", *export)
    train = [bundle, "--steps", STEPS, "--seq-len", SEQ_LEN, "--val-batches", VAL_BATCHES]
    train += ["--optimizer", "adamw", "--learning-rate", learning_rate, "--out", run]
    command("mesp.commands.train", *train)
    before, after = RunLog.load(run).held_out
    if not after < before:
        raise click.ClickException(f"training raised the loss from {before} to {after}")

    quantized, fused = out / "quantized", out / "fused"
    how = {"quantize": True, "q_group_size": GROUP_SIZE, "q_bits": BITS, "dtype": "float32"}
    mlx_lm.convert(str(source.folder), str(quantized), **how)
    check("the model", before, loss(quantized, bundle))
    check("with adapters", after, loss(quantized, bundle, run / "adapters"))
    fuse = ["fuse", "--model", quantized, "--adapter-path", run / "adapters", "--dequantize"]
    call(sys.executable, "-m", "mlx_lm", *fuse, "--save-path", fused)
    check("fused", after, loss(fused, bundle))


def loss(model: Path, bundle: Path, adapters: Path | None = None) -> float:
    network, _ = mlx_lm.load(
        str(model), {"trust_remote_code": False}, model_config={"model_file": None}
    )
    if adapters:
        load_adapters(network, str(adapters))
    network.eval()
    return measure_held_out_loss(network, Bundle(bundle), SEQ_LEN, VAL_BATCHES)


def check(what: str, trainer: float, mlx_lm_loss: float) -> None:
    click.echo(f"{what}: {trainer:.4f} in the trainer, {mlx_lm_loss:.4f} in mlx-lm")
    if (difference := abs(trainer - mlx_lm_loss)) > TOLERANCE:
        raise click.ClickException(f"{what}: the losses differ by {difference:.2g}")


def command(module: str, *arguments: object) -> None:
    call(sys.executable, "-c", f"from {module} import main; main()", *arguments)


def call(*arguments: object) -> None:
    done = subprocess.run([str(argument) for argument in arguments])
    if done.returncode:
        raise click.ClickException(f"{arguments[-1]}: exit status {done.returncode}")


if __name__ == "__main__":
    main()
