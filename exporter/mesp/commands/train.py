"""mesp-train: fine-tunes a bundle with mesp-engine.

The engine reads one settings file and prints a record a line (docs/architecture.md). This command
checks the options, writes that file, starts the engine, and shows what it reports.
"""

from __future__ import annotations

import math
import sys
from datetime import datetime, timezone
from pathlib import Path

import click

from mesp.bundle.manifest import read_manifest
from mesp.commands.options_from_yaml import read_config
from mesp.commands.train_settings import (
    OBJECTIVES,
    check,
    choose,
    choose_update,
    parameter,
    resumed,
    settings_file,
)
from mesp.engine.build import find_engine
from mesp.engine.drive import drive
from mesp.engine.plan import (
    describe_count,
    describe_optimizers,
    describe_plan,
    find_count,
    find_plan,
)
from mesp.engine.update_defaults import OPTIMIZERS
from mesp.errors import MespError
from mesp.formatting import decimal, duration, megabytes, quality
from mesp.models.families import TRAINABLE
from mesp.runs.log import LOG_NAME, Run

PREFERRED_SEQ_LEN = 256


class Number(click.FloatRange):
    """A finite number in a range: click's own comparisons let `nan` through."""

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        converted = super().convert(value, param, ctx)
        if not math.isfinite(converted):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return converted


POSITIVE = Number(min=0, min_open=True)
FROM_ZERO = Number(min=0)
FRACTION = Number(min=0, max=1, max_open=True)


class Projections(click.ParamType):
    """Some modules of a block, as in `q,v` or `qkv,gate_up`; a list in the engine's order."""

    name = "list"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[str]:
        wanted = value if isinstance(value, list) else [part.strip() for part in value.split(",")]
        for each in wanted:
            if each not in TRAINABLE:
                self.fail(f"{each!r} is not one of {', '.join(TRAINABLE)}.", param, ctx)
        return [each for each in TRAINABLE if each in wanted]


def refuse(context: click.Context, parameter: click.Parameter, value: object) -> None:
    """The callback of what other trainers have and a MeSP block can't."""
    why = {
        "dropout": "LoRA dropout needs a random mask at each projection's input",
        "dora": "DoRA needs the length of each column of W + s A B",
        "fine_tune_type": "--fine-tune-type {} is not LoRA",
    }
    if value and value != "lora":
        raise MespError(
            f"{why[parameter.name].format(value)}, and the block function, exported as "
            "y = x Wᵀ + s (x A) B, has no place for it: leave it out."
        )


@click.command(
    short_help="Fine-tune a bundle's model with LoRA.",
    context_settings={"show_default": True, "help_option_names": ["-h", "--help"]},
)
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@click.option(
    "-c",
    "--config",
    type=click.Path(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=read_config,
    help="YAML file with any of these options by name, as in `seq_len: 128`, and `bundle`; "
    "what is typed counts more.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Folder of the run.  [default: runs/BUNDLE-METHOD-TIME]",
)
@click.option(
    "--method",
    type=click.Choice(["mesp", "mebp", "mezo"]),
    default="mesp",
    help="How gradients are found.",
)
@click.option("--steps", type=click.IntRange(min=1), help="Updates of the adapters.  [required]")
@click.option(
    "--seq-len",
    type=click.IntRange(min=1),
    help="Tokens a sequence.  [default: 256 or the bundle's longest]",
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=1, help="Sequences a gradient is made of."
)
@click.option(
    "--grad-accumulation-steps",
    type=click.IntRange(min=1),
    default=1,
    help="Batches whose mean gradient makes an update.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    help="Of the adapters' start and the data's order.",
)
@click.option(
    "--rank", type=click.IntRange(min=1), help="LoRA rank.  [default: the bundle's first]"
)
@click.option("--alpha", type=POSITIVE, default=16.0, help="The adapters count alpha / rank.")
@click.option("--rslora", is_flag=True, help="The adapters count alpha / √rank.")
@click.option(
    "--projections",
    type=Projections(),
    help="Which have adapters that are trained, as in q,v or, where q, k and v are one, qkv.  "
    "[default: all]",
)
@click.option(
    "--num-layers", type=click.IntRange(min=1), help="Train the last N blocks only.  [default: all]"
)
@click.option(
    "--lora-dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    help="Of the adapters in training; bfloat16 takes half the memory and rounds at random.",
)
@click.option(
    "--adapters",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Start from the adapters in this folder, of mlx-lm's or PEFT's form.",
)
@click.option(
    "--objective",
    type=click.Choice(OBJECTIVES),
    help="Learn from answers that people have judged: from pairs with dpo, ipo, simpo or orpo, "
    "from single ones with kto.",
)
@click.option(
    "--beta", type=POSITIVE, help="What an objective scales rewards by; of ipo τ.  [default: 0.1]"
)
@click.option("--gamma", type=FROM_ZERO, help="The margin that simpo wants.  [default: 0.5]")
@click.option("--desirable-weight", type=POSITIVE, help="Of kto's good answers.  [default: 1]")
@click.option("--undesirable-weight", type=POSITIVE, help="Of kto's bad answers.  [default: 1]")
@click.option(
    "--optimizer",
    type=click.Choice(OPTIMIZERS),
    help="AdamW keeps 8 bytes a parameter of the adapters, with its moments in 8 bits 2, SGD none: "
    "--dry-run says what that takes.  [default: adamw8bit; of mezo sgd]",
)
@click.option(
    "--learning-rate",
    type=POSITIVE,
    help="[default: of AdamW 0.014 / √hidden size, of SGD 0.1, a tenth of these with an "
    "objective; of mezo 1e-4]",
)
@click.option("--paper", is_flag=True, help="Update as the paper does: SGD at 1e-4.")
@click.option("--momentum", type=FRACTION, default=0.0, help="Of SGD.")
@click.option("--beta1", type=FRACTION, default=0.9, help="Of AdamW.")
@click.option("--beta2", type=FRACTION, default=0.999, help="Of AdamW.")
@click.option("--epsilon", type=POSITIVE, default=1e-8, help="Of AdamW.")
@click.option("--weight-decay", type=FROM_ZERO, default=0.0)
@click.option(
    "--schedule",
    type=click.Choice(["constant", "linear", "cosine"]),
    default="constant",
    help="How the learning rate falls to zero after the warm-up.",
)
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=0,
    help="Steps over which the learning rate rises from zero.",
)
@click.option("--max-grad-norm", type=POSITIVE, help="Clip gradients to this norm over all blocks.")
@click.option(
    "--skip-bad-steps",
    is_flag=True,
    help="Take a step back whose loss or gradient is not finite, and go on; holds the parameters "
    "twice.",
)
@click.option("--mezo-epsilon", type=POSITIVE, default=1e-3, help="Size of MeZO's perturbation.")
@click.option(
    "--val-batches",
    type=click.IntRange(min=0),
    default=25,
    help="Held-out sequences an evaluation takes.",
)
@click.option(
    "--eval-every",
    type=click.IntRange(min=0),
    default=0,
    help="Steps between evaluations, of which the best is kept; 0: before and after.",
)
@click.option(
    "--early-stopping",
    type=click.IntRange(min=0),
    default=0,
    help="End after so many evaluations without a better one; 0: never.",
)
@click.option("--test", is_flag=True, help="Evaluate on the test data at the end.")
@click.option(
    "--save-every",
    type=click.IntRange(min=0),
    default=100,
    help="Steps between saves, beside one after a minute and then every three; 0: at the end only.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with the run in --output, with its settings; what may change is --steps, "
    "--save-every and where memory goes.",
)
@click.option(
    "--memory-limit",
    "memory_limit_mb",
    type=POSITIVE,
    metavar="MB",
    help="Peak footprint to stay below, in 10⁶ bytes; room to spare is used for speed.",
)
@click.option(
    "--offload",
    type=click.Choice(["none", "inputs", "all"]),
    help="Keep block inputs, or the optimizer's state too, in a file on disk.  "
    "[default: what the limit asks for]",
)
@click.option(
    "--keep-cache",
    is_flag=True,
    help="Let MLX keep freed buffers from block to block, where there is memory for it: faster on "
    "a GPU where buffers are slow to make.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the plan, its predicted memory and what a step counts on a phone's GPU, and end.",
)
@click.option(
    "--dropout", "--lora-dropout", type=float, hidden=True, expose_value=False, callback=refuse
)
@click.option(
    "--dora", "--use-dora", is_flag=True, hidden=True, expose_value=False, callback=refuse
)
@click.option("--fine-tune-type", hidden=True, expose_value=False, callback=refuse)
@click.pass_context
def main(context: click.Context, output: Path | None, paper: bool, **options: object) -> None:
    """Fine-tune BUNDLE, a folder that mesp-export wrote, with LoRA.

    Ctrl-C stops the run soon, with its adapters saved; a second Ctrl-C ends it at once.
    """
    for name in ("bundle", "adapters"):
        if options[name] is not None:
            options[name] = str(options[name].resolve())
    if options["resume"]:
        options = resumed(context, output, options)
    for name in ("bundle", "steps"):
        if options[name] is None:
            raise click.MissingParameter(ctx=context, param=parameter(context, name))
    manifest = read_manifest(Path(options["bundle"]), to_run=not options["dry_run"])
    options["seq_len"] = choose(
        manifest["seq_lens"], options["seq_len"], "sequence length", PREFERRED_SEQ_LEN
    )
    options["rank"] = choose(manifest["ranks"], options["rank"], "rank", manifest["ranks"][0])
    choose_update(context, options, manifest, paper)
    check(context, options, manifest)
    if output is None:
        stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        output = Path("runs") / f"{manifest['name']}-{options['method']}-{stamp}"
    if (output / LOG_NAME).exists() and not options["resume"]:
        raise MespError(
            f"{output} already holds a run: name another folder with --output, "
            "or go on with it with --resume."
        )
    settings = options | {"output": str(output.resolve())}
    # In the order of --help, for those who read the file.
    settings = {
        each.name: settings[each.name] for each in context.command.params if each.name in settings
    }

    engine = find_engine()
    if options["dry_run"]:
        click.echo(describe_plan(find_plan(engine, settings)))
        click.echo(describe_optimizers(engine, settings))
        if manifest["device"] == "gpu" and sys.platform != "darwin":  # whose engine cannot count
            click.echo(describe_count(find_count(engine, settings)))
        return
    with settings_file(output, settings) as path:
        run, status = drive(engine, path, options["method"], options["steps"])
    click.echo(summary(run, output))
    raise SystemExit(status)


def summary(run: Run, output: Path) -> str:
    """What a run came to, in a few lines."""
    done = "Finished" if run.end["reason"] == "finished" else "Stopped"
    lines = [
        f"{done} after {run.last_step} steps in {duration(run.end['seconds'])}: "
        f"{decimal(run.tokens_per_second, 0)} tokens/s, "
        f"peak footprint {megabytes(run.peak_footprint)} MB."
    ]
    before, after = run.held_out
    if before is not None and after is not None:
        judged = run.settings.get("objective")
        unit = quality(run.evals_of("valid")[-1]) if judged else "nats a token"
        lines.append(
            f"Held-out loss {decimal(before, 3)} before, {decimal(after, 3)} after ({unit})."
        )
    if run.test is not None:
        lines.append(f"Test loss {decimal(run.test, 3)}, {quality(run.evals_of('test')[-1])}.")
    lines += [f"Adapters: {output / 'adapters'}"]
    if run.best and (output / "best").exists():
        step, loss = run.best["step"], decimal(run.best["loss"], 3)
        lines += [f"Best:     {output / 'best'} (step {step}, held-out loss {loss})"]
    return "\n".join([*lines, f"Log:      {output / LOG_NAME}"])
