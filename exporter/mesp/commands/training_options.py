"""The options of training, which mesp-train and mesp-federate have."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import click

from mesp.commands.options_from_yaml import read_config
from mesp.engine.update_defaults import OPTIMIZERS
from mesp.errors import MespError
from mesp.models.families import TRAINABLE


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

OBJECTIVES = ("dpo", "ipo", "simpo", "orpo", "kto")


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


def group(*options: Callable) -> Callable[[Callable], Callable]:
    """A decorator that adds options to a command, in this order."""

    def decorate(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


config_option = click.option(
    "-c",
    "--config",
    type=click.Path(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=read_config,
    help="YAML file with any of these options by name, as in `seq_len: 128`, and `bundle`; "
    "what is typed counts more.",
)

method_option = group(
    click.option(
        "--method",
        type=click.Choice(["mesp", "mebp", "mezo"]),
        default="mesp",
        help="How gradients are found.",
    ),
)

adapter_options = group(
    click.option(
        "--seq-len",
        type=click.IntRange(min=1),
        help="Tokens a sequence.  [default: 256 or the bundle's longest]",
    ),
    click.option(
        "--batch-size",
        type=click.IntRange(min=1),
        default=1,
        help="Sequences a gradient is made of.",
    ),
    click.option(
        "--grad-accumulation-steps",
        type=click.IntRange(min=1),
        default=1,
        help="Batches whose mean gradient makes an update.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(0, 2**31 - 1),
        default=0,
        help="Of the adapters' start and the data's order.",
    ),
    click.option(
        "--rank", type=click.IntRange(min=1), help="LoRA rank.  [default: the bundle's first]"
    ),
    click.option("--alpha", type=POSITIVE, default=16.0, help="The adapters count alpha / rank."),
    click.option("--rslora", is_flag=True, help="The adapters count alpha / √rank."),
    click.option(
        "--projections",
        type=Projections(),
        help="Which have adapters that are trained, as in q,v or, where q, k and v are one, qkv.  "
        "[default: all]",
    ),
    click.option(
        "--num-layers",
        type=click.IntRange(min=1),
        help="Train the last N blocks only.  [default: all]",
    ),
    click.option(
        "--lora-dtype",
        type=click.Choice(["float32", "bfloat16"]),
        default="float32",
        help="Of the adapters in training; bfloat16 takes half the memory and rounds at random.",
    ),
)


def freeze_a_option(default: bool) -> Callable[[Callable], Callable]:
    """Whether B alone is trained."""
    return click.option(
        "--freeze-a/--no-freeze-a",
        default=default,
        help="Train each B only, and leave A as it is (FFA-LoRA).",
    )


update_options = group(
    click.option(
        "--optimizer",
        type=click.Choice(OPTIMIZERS),
        help="AdamW keeps 8 bytes a parameter of the adapters, with its moments in 8 bits 2, SGD "
        "none.  [default: adamw8bit; of mezo sgd]",
    ),
    click.option(
        "--learning-rate",
        type=POSITIVE,
        help="[default: of AdamW 0.014 / √hidden size, of SGD 0.1, a tenth of these with an "
        "objective; of mezo 1e-4]",
    ),
    click.option("--paper", is_flag=True, help="Update as the paper does: SGD at 1e-4."),
    click.option("--momentum", type=FRACTION, default=0.0, help="Of SGD."),
    click.option("--beta1", type=FRACTION, default=0.9, help="Of AdamW."),
    click.option("--beta2", type=FRACTION, default=0.999, help="Of AdamW."),
    click.option("--epsilon", type=POSITIVE, default=1e-8, help="Of AdamW."),
    click.option("--weight-decay", type=FROM_ZERO, default=0.0),
    click.option(
        "--schedule",
        type=click.Choice(["constant", "linear", "cosine"]),
        default="constant",
        help="How the learning rate falls to zero after the warm-up.",
    ),
    click.option(
        "--warmup",
        type=click.IntRange(min=0),
        default=0,
        help="Steps over which the learning rate rises from zero.",
    ),
    click.option(
        "--max-grad-norm", type=POSITIVE, help="Clip gradients to this norm over all blocks."
    ),
    click.option(
        "--skip-bad-steps",
        is_flag=True,
        help="Take a step back whose loss or gradient is not finite, and go on; holds the "
        "parameters twice.",
    ),
    click.option(
        "--mezo-epsilon", type=POSITIVE, default=1e-3, help="Size of MeZO's perturbation."
    ),
)

privacy_options = group(
    click.option(
        "--dp-clip",
        type=POSITIVE,
        help="Differential privacy (DP-SGD): clip each example's gradient to this norm; a step "
        "draws --batch-size examples in the mean.",
    ),
    click.option(
        "--dp-noise",
        type=FROM_ZERO,
        help="Standard deviation of the noise on their sum, as a multiple of --dp-clip.",
    ),
    click.option(
        "--dp-delta",
        type=Number(min=0, min_open=True, max=1, max_open=True),
        default=1e-5,
        help="δ at which ε is reported; well below 1 / examples.",
    ),
)

evaluation_option = group(
    click.option(
        "--val-batches",
        type=click.IntRange(min=0),
        default=25,
        help="Held-out sequences an evaluation takes.",
    ),
)

memory_options = group(
    click.option(
        "--memory-limit",
        "memory_limit_mb",
        type=POSITIVE,
        metavar="MB",
        help="Peak footprint to stay below, in 10⁶ bytes; room to spare is used for speed.",
    ),
    click.option(
        "--offload",
        type=click.Choice(["none", "inputs", "all"]),
        help="Keep block inputs, or the optimizer's state too, in a file on disk.  "
        "[default: what the limit asks for]",
    ),
)

# What other trainers have and a MeSP block cannot: refused in a sentence.
refused_options = group(
    click.option(
        "--dropout", "--lora-dropout", type=float, hidden=True, expose_value=False, callback=refuse
    ),
    click.option(
        "--dora", "--use-dora", is_flag=True, hidden=True, expose_value=False, callback=refuse
    ),
    click.option("--fine-tune-type", hidden=True, expose_value=False, callback=refuse),
)
