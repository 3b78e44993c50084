"""mesp-train: fine-tunes a bundle with mesp-engine.

The engine reads one settings file and prints a record a line (docs/architecture.md). This command
checks the options, writes that file, starts the engine, and shows what it reports.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mesp.bundle.manifest import read_manifest
from mesp.commands.train_settings import (
    check_goal,
    check_privacy,
    complete,
    default_output,
    require,
    resumed,
    settings_file,
)
from mesp.commands.training_options import (
    FROM_ZERO,
    OBJECTIVES,
    POSITIVE,
    adapter_options,
    config_option,
    evaluation_option,
    freeze_a_option,
    memory_options,
    method_option,
    privacy_options,
    refused_options,
    update_options,
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
from mesp.errors import Command, MespError
from mesp.formatting import decimal, duration, megabytes, quality
from mesp.runs.log import LOG_NAME, Run
from mesp.runs.privacy import describe_privacy


@click.command(
    cls=Command,
    short_help="Fine-tune a bundle's model with LoRA.",
    context_settings={"show_default": True, "help_option_names": ["-h", "--help"]},
)
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@config_option
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Folder of the run.  [default: runs/BUNDLE-METHOD-TIME]",
)
@method_option
@click.option("--steps", type=click.IntRange(min=1), help="Updates of the adapters.  [required]")
@adapter_options
@freeze_a_option(default=False)
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
@update_options
@privacy_options
@evaluation_option
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
@memory_options
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the plan, its predicted memory and what a step counts on a phone's GPU, and end.",
)
@refused_options
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
    require(context, options, "bundle", "steps")
    manifest = read_manifest(Path(options["bundle"]), to_run=not options["dry_run"])
    complete(context, options, manifest, paper)
    check_goal(options, manifest)
    check_privacy(context, options)
    if output is None:
        output = default_output(manifest, options["method"])
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
    is_private = options["dp_clip"] is not None
    if is_private or options["dry_run"]:
        plan = find_plan(engine, settings)
    if is_private:
        click.echo(describe_privacy(settings, plan["examples"], settings["steps"]))
    if options["dry_run"]:
        click.echo(describe_plan(plan))
        click.echo(describe_optimizers(engine, settings))
        if manifest["device"] == "gpu" and sys.platform != "darwin":  # whose engine cannot count
            click.echo(describe_count(find_count(engine, settings)))
        return
    with settings_file(output, settings) as path:
        run, status = drive(engine, path, options["method"], options["steps"])
    click.echo(summary(run, output))
    if is_private:
        click.echo(describe_privacy(settings, run.plan["examples"], run.end["step"]))
    raise SystemExit(status)


def summary(run: Run, output: Path) -> str:
    """What a run came to, in a few lines."""
    done = "Finished" if run.end["reason"] == "finished" else "Stopped"
    lines = [
        f"{done} after {run.last_step} steps in {duration(run.end['seconds'])}: "
        f"{run.speed.words('tokens/s')}, "
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
