from __future__ import annotations

import logging
import shlex
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from mesp.commands.command import Command
from mesp.commands.config import config_option
from mesp.commands.fine_tune_type import fine_tune_type_option
from mesp.commands.progress_bars import TrainingProgress
from mesp.engine.build import find_engine
from mesp.engine.plan import describe_count, describe_optimizers, describe_plan, describe_privacy
from mesp.engine.process import find_count, find_plan
from mesp.engine.train import TrainingJob, prepare_training
from mesp.errors import MespError
from mesp.formatting import decimal, duration, megabytes, quality
from mesp.runs.log import LOG_NAME, RunLog
from mesp.settings.command_options import add_options, find_given, paper_option, require_values
from mesp.settings.train_settings import TrainSettings

log = logging.getLogger(__name__)


@click.command(cls=Command)
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@config_option
@click.option(
    "--out", "output", type=click.Path(path_type=Path), show_default="runs/BUNDLE-METHOD-TIME",
    help="Folder of the run.",
)  # fmt: skip
@click.option(
    "--epochs", type=float, metavar="NUMBER",
    help="Passes over the training data, in place of --steps.",
)  # fmt: skip
@add_options(TrainSettings)
@paper_option
@click.option(
    "--resume", is_flag=True,
    help="Resume the run in --out with its settings; --steps or --epochs, --save-every and the "
    "memory options may change. A --reward module:function is given again.",
)  # fmt: skip
@click.option(
    "--dry-run", is_flag=True,
    help="Print the plan, its predicted memory and, with --device gpu, what a step counts on a "
    "phone's GPU, and end.",
)  # fmt: skip
@fine_tune_type_option
@click.pass_context
def main(
    context: click.Context, /, bundle: Path | None, output: Path | None, epochs: float | None,
    paper: bool, resume: bool, dry_run: bool, fine_tune_type: str | None, **_: Any,
) -> None:  # fmt: skip
    """Fine-tune BUNDLE, a folder that mesp-export wrote, with LoRA.

    Ctrl-C stops the run soon, saves its adapters and prints the command that resumes it. A second
    Ctrl-C ends it at once.
    """
    if not resume:
        require_values(context, "bundle", *(["steps"] if epochs is None else []))
    settings = find_given(context, TrainSettings)
    if fine_tune_type == "dora":
        settings["dora"] = True
    is_typed = context.get_parameter_source("reward") is ParameterSource.COMMANDLINE
    job = prepare_training(bundle, output, resume, paper, settings, epochs, may_import=is_typed)
    find_engine()  # builds the engine if necessary
    if epochs is not None:
        click.echo(f"{epochs:g} epoch{'s' * (epochs != 1)} take {job.settings.steps:,} steps.")
    is_private = job.settings.dp_clip is not None
    if is_private or dry_run:
        plan = find_plan(find_engine(), job.to_json())
    if is_private:
        click.echo(describe_privacy(job.settings, plan["examples"], job.settings.steps))
    if dry_run:
        show_plan(job, plan)
        return
    with TrainingProgress(job.settings.method, job.settings.steps) as display:
        run = job.run(display.show)
    click.echo(summary(run, job.folder))
    if run.end["reason"] == "stopped":
        click.echo(f"To resume: {resume_command(job)}")
    if is_private:
        click.echo(describe_privacy(job.settings, run.plan["examples"], run.end["step"]))
    raise SystemExit(128 + run.stopped_by if run.stopped_by else 0)


def resume_command(job: TrainingJob) -> str:
    """The command includes --reward, because a reward function is imported only if it is given on
    the command line.
    """
    command = ["mesp", "train", "--resume", "--out", str(job.folder)]
    if job.settings.reward is not None:
        command += ["--reward", job.settings.reward]
    return shlex.join(command)


def show_plan(job: TrainingJob, plan: dict[str, Any]) -> None:
    """With the device gpu, also prints a step's work on a phone's GPU if mesp-count can
    count it.
    """
    engine, settings = find_engine(), job.to_json()
    click.echo(describe_plan(plan))
    click.echo(describe_optimizers(engine, settings))
    # mesp-count runs only on Linux, and cannot count experts.
    can_count = sys.platform != "darwin" and not job.manifest.architecture.has_experts
    if job.settings.device == "gpu" and can_count:
        try:
            click.echo(describe_count(find_count(settings)))
            if job.settings.blocks_per_step:
                click.echo("These counts are of a step without --blocks-per-step.")
        except MespError as error:  # only the counts are left out
            log.warning("A phone's work is not counted: %s", error.message)


def summary(run: RunLog, output: Path) -> str:
    done = "Finished" if run.end["reason"] == "finished" else "Stopped"
    lines = [
        f"{done} after {run.last_step} steps in {duration(run.end['seconds'])}: "
        f"{run.speed.words('tokens/s')}, "
        f"peak footprint {megabytes(run.peak_bytes)} MB."
    ]
    before, after = run.held_out
    if before is not None and after is not None:
        objective = run.settings.get("objective")
        unit = quality(run.evals_of("valid")[-1]) if objective else "nats a token"
        lines.append(
            f"Held-out loss {decimal(before, 3)} before, {decimal(after, 3)} after ({unit})."
        )
    if kept := run.describe_strength():
        lines.append(kept)
    if run.test is not None:
        lines.append(f"Test loss {decimal(run.test, 3)}, {quality(run.evals_of('test')[-1])}.")
    lines += [f"Adapters: {output / 'adapters'}"]
    if run.best and (output / "best").exists():
        step, loss = run.best["step"], decimal(run.best["loss"], 3)
        lines += [f"Best:     {output / 'best'} (step {step}, held-out loss {loss})"]
    return "\n".join([*lines, f"Log:      {output / LOG_NAME}"])
