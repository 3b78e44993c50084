"""The settings of a run, `settings.json`: made of mesp-train's options, checked, and written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

import click
from click.core import ParameterSource

from mesp.commands.training_options import OBJECTIVES
from mesp.engine.update_defaults import ADAMW, PAPER, default_learning_rate, default_optimizer
from mesp.errors import MespError, plain_os_errors
from mesp.files import read_object, write_whole
from mesp.models.architecture import Architecture
from mesp.runs.log import LOG_NAME

SETTINGS_NAME = "settings.json"
PREFERRED_SEQ_LEN = 256

# What a run that goes on may have different: all of it changes nothing that is computed.
MAY_CHANGE = ("bundle", "steps", "save_every", "memory_limit_mb", "offload", "dp_delta", "resume")

# What settings.json may lack, of runs that were begun before there were these.
ADDED = (
    *("objective", "beta", "gamma", "desirable_weight", "undesirable_weight", "freeze_a"),
    *("delta", "dp_clip", "dp_noise", "dp_delta"),
)

# Options that count only where another one has one of these values.
ONLY_WITH = {
    "momentum": ("optimizer", ("sgd",)),
    "beta1": ("optimizer", ADAMW),
    "beta2": ("optimizer", ADAMW),
    "epsilon": ("optimizer", ADAMW),
    "mezo_epsilon": ("method", ("mezo",)),
    "beta": ("objective", OBJECTIVES),
    "gamma": ("objective", ("simpo",)),
    "desirable_weight": ("objective", ("kto",)),
    "undesirable_weight": ("objective", ("kto",)),
}


def parameter(context: click.Context, name: str) -> click.Parameter:
    """The command's option or argument of that name."""
    return next(each for each in context.command.params if each.name == name)


def flag(context: click.Context, name: str) -> str:
    """What is typed for an option, as in `--seq-len`."""
    return parameter(context, name).opts[-1]


def default_of(context: click.Context, option: click.Parameter) -> object:
    """What the option is where it isn't given; None where it has no default, for which some
    versions of click have a sentinel."""
    default = option.get_default(context)
    return None if option.value_is_missing(default) else default


def require(context: click.Context, options: dict, *names: str) -> None:
    """Raises click's own error for the first that is neither given nor resumed."""
    for name in names:
        if options[name] is None:
            raise click.MissingParameter(ctx=context, param=parameter(context, name))


def default_output(manifest: dict, kind: str) -> Path:
    """A run's folder where none is named: `runs/BUNDLE-KIND-TIME`."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    return Path("runs") / f"{manifest['name']}-{kind}-{stamp}"


def resumed(
    context: click.Context,
    output: Path | None,
    given: dict,
    begun: str = LOG_NAME,
    may_change: tuple[str, ...] = MAY_CHANGE,
) -> dict:
    """The settings of the run in `output`, with what is given of those that `may_change`.

    A run has `begun` where it has a file of that name. Raises MespError where there is no run, or
    where another option would change it.
    """
    if output is None:
        raise MespError("Say which run to go on with: --resume --output FOLDER.")
    path = output / SETTINGS_NAME
    if not (output / begun).exists():
        raise MespError(f"{output} holds no run to go on with; start one without --resume.")
    try:
        with plain_os_errors(f"Cannot read {path}"):
            settings = read_object(path)
        defaults = {n: default_of(context, parameter(context, n)) for n in ADDED if n in given}
        before = defaults | settings
        recorded = {n: before[n] for n in given}
        for name, value in recorded.items():
            if isinstance(given[name], dict):
                _check_numbers(name, value)
            else:
                _check_recorded(context, parameter(context, name), value)
    except (ValueError, KeyError, click.BadParameter) as error:
        raise MespError(f"{path} is not the settings of a run; start a new one.") from error
    for name, value in given.items():
        if context.get_parameter_source(name) == ParameterSource.DEFAULT:
            continue
        if name not in may_change and value != recorded[name]:
            was = "not set" if recorded[name] is None else recorded[name]
            raise MespError(
                f"A run that goes on keeps its settings: {flag(context, name)} is "
                f"{was} and cannot become {value}."
            )
        recorded[name] = value
    return recorded


def _check_numbers(name: str, value: object) -> None:
    """Raises ValueError unless a setting is an object of numbers."""
    if not isinstance(value, dict) or not all(type(n) in (int, float) for n in value.values()):
        raise ValueError(f"its {name} is not an object of numbers")


def _check_recorded(context: click.Context, option: click.Parameter, value: object) -> None:
    """Raises ValueError or click.BadParameter unless a setting is what the option makes of a text,
    a list of several, or None where the option has no default."""
    listed = value if isinstance(value, list) else [value]
    if value is None and default_of(context, option) is None:
        return
    if not all(isinstance(each, str | int | float) for each in listed):
        raise ValueError(f"its {option.name} is no value")
    if isinstance(option.type, click.Path):
        # The adapters that a run began with may be gone; its state has what they became.
        if not isinstance(value, str):
            raise ValueError(f"its {option.name} is no path")
        return
    made = option.type_cast_value(context, ",".join(map(str, listed)))
    for kind in (bool, int | float, list | tuple):
        if isinstance(value, kind) != isinstance(made, kind):
            raise ValueError(f"its {option.name} is of another type")


def choose(available: list[int], wanted: int | None, what: str, preferred: int) -> int:
    """What was asked for, if the bundle has it; by default the preferred value or the largest."""
    if wanted is None:
        return preferred if preferred in available else max(available)
    if wanted not in available:
        listed = ", ".join(str(value) for value in available)
        raise MespError(f"The bundle has no {what} {wanted}; it was exported for {listed}.")
    return wanted


def complete(context: click.Context, options: dict, manifest: dict, paper: bool) -> None:
    """Fills in what is not given and goes by the bundle, and refuses, in a sentence, what does not
    go together or what the bundle can't serve."""
    options["seq_len"] = choose(
        manifest["seq_lens"], options["seq_len"], "sequence length", PREFERRED_SEQ_LEN
    )
    options["rank"] = choose(manifest["ranks"], options["rank"], "rank", manifest["ranks"][0])
    choose_update(context, options, manifest, paper)
    check_training(context, options, manifest)


def choose_update(context: click.Context, options: dict, manifest: dict, paper: bool) -> None:
    """Fills in the optimizer and the learning rate where none is given: `--paper`, or defaults.

    Raises MespError where `--paper` and what is given, or was by the run that goes on, differ.
    """
    for name, value in PAPER.items() if paper else ():
        if options[name] not in (None, value):
            raise MespError(
                f"--paper has {flag(context, name)} {value}, not {options[name]}: "
                "leave out one of them."
            )
        options[name] = value
    method, arch = options["method"], Architecture.from_manifest(manifest["architecture"])
    options["optimizer"] = options["optimizer"] or default_optimizer(method)
    options["learning_rate"] = options["learning_rate"] or default_learning_rate(
        method, options["optimizer"], arch.hidden_size, options.get("objective")
    )


def check_training(context: click.Context, options: dict, manifest: dict) -> None:
    """Refuses, in a sentence, options of the update and the adapters that have no use."""

    def changed(name: str) -> bool:
        # A default is no request, even where it is written out: settings.json may be a --config.
        return options[name] not in (None, parameter(context, name).default)

    for name, (other, values) in ONLY_WITH.items():
        if name in options and changed(name) and options[other] not in values:
            raise MespError(
                f"{flag(context, name)} has no use without {flag(context, other)} "
                f"{' or '.join(values)}: leave it out."
            )
    if options["warmup"] >= options["steps"]:
        raise MespError(
            f"--warmup {options['warmup']} does not end within --steps {options['steps']}."
        )
    arch = Architecture.from_manifest(manifest["architecture"])
    for each in options["projections"] or ():
        if each not in arch.trainable:
            raise MespError(
                f"--projections {each} is not in the model's blocks; "
                f"they have {', '.join(arch.trainable)}."
            )
    layers = arch.num_hidden_layers
    if (options["num_layers"] or 1) > layers:
        raise MespError(f"--num-layers {options['num_layers']} is more than the {layers} blocks.")


def check_goal(options: dict, manifest: dict) -> None:
    """Refuses, in a sentence, objectives and evaluations that the bundle's data can't serve."""
    if options["objective"] == "kto" and options["batch_size"] < 2:
        raise MespError(
            "--objective kto takes each prompt with the answer of another record of the batch: "
            "set --batch-size to 2 or more."
        )
    check_labels(options["objective"], manifest)
    held = manifest.get("data") or {}
    if options["early_stopping"] and not (
        options["eval_every"] and options["val_batches"] and "valid" in held
    ):
        raise MespError(
            "--early-stopping needs evaluations on the way: --eval-every and --val-batches above "
            "0, and a bundle with held-out data."
        )
    if options["test"] and "test" not in held:
        raise MespError("--test needs test data, and the bundle has none: export it with some.")


def check_privacy(context: click.Context, options: dict) -> None:
    """Refuses, in a sentence, what does not go together with DP-SGD."""
    clip, noise = options["dp_clip"], options["dp_noise"]
    if clip is None and noise is None:
        return
    if clip is None or noise is None:
        raise MespError(
            "--dp-clip and --dp-noise go together: give both, with --dp-noise 0 for no noise."
        )
    refused = {
        "method": "mezo",
        "objective": "kto",
        "max_grad_norm": options["max_grad_norm"],
        "skip_bad_steps": True,
    }
    for name, value in refused.items():
        if value is not None and options[name] == value:
            typed = flag(context, name) + ("" if value is True else f" {value}")
            raise MespError(f"{typed} does not go together with --dp-clip: leave out one of them.")
    if options["grad_accumulation_steps"] > 1:
        raise MespError(
            "--dp-clip takes one batch a step: leave out --grad-accumulation-steps, and set "
            "--batch-size to the examples of a step."
        )


def check_labels(objective: str | None, manifest: dict) -> None:
    """Refuses data without judged answers for an objective, and such data without one."""
    train = (manifest.get("data") or {}).get("train")
    if train is None or ("labels" in train) == (objective is not None):
        return
    if objective is None:
        raise MespError(
            "The bundle's data has answers that people have judged: choose an --objective for "
            "them, or give it other data with mesp-data."
        )
    answers = '"completion" and "label"' if objective == "kto" else '"chosen" and "rejected"'
    raise MespError(
        f'--objective {objective} needs records of a "prompt", {answers}, and the bundle has '
        "others: give it some with mesp-data."
    )


@contextmanager
def settings_file(output: Path, settings: dict) -> Iterator[Path]:
    """Writes OUTPUT/settings.json. A run that fails before it has a log leaves nothing behind."""
    path = output / SETTINGS_NAME
    missing = [folder for folder in (output, *output.parents) if not folder.exists()]
    try:
        with plain_os_errors(f"Cannot write the run to {output}"):
            output.mkdir(parents=True, exist_ok=True)
            write_whole(path, (json.dumps(settings, indent=2) + "\n").encode())
        yield path
    except BaseException:
        if not (output / LOG_NAME).exists():
            for file in (path, output / ".lock"):  # the engine's, which has ended
                with suppress(OSError):
                    file.unlink()
            for folder in missing:
                try:
                    folder.rmdir()
                except OSError:
                    break
        raise
