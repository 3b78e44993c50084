from __future__ import annotations

from importlib import import_module
from typing import Any

import click

import mesp
from mesp.errors import exit_at_signals

# The help line of each command.
COMMANDS = {
    "export": "Write a model as a bundle.",
    "models": "List the models that have short names.",
    "check": "Check a bundle, and training with it on this machine.",
    "data": "Replace the data in a bundle.",
    "train": "Fine-tune a bundle's model with LoRA.",
    "generate": "Continue a prompt.",
    "evaluate": "Measure how good a model is.",
    "fuse": "Put adapters into the weights.",
    "report": "Write a page about runs.",
    "federate": "Fine-tune a bundle with the data of many people.",
}


class Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"mesp.commands.{cmd_name}").main
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        with exit_at_signals():
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=Commands, name="mesp", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(mesp.__version__, message="mesp %(version)s")
def main() -> None:
    """Fine-tune quantized language models with LoRA, in tens of megabytes."""


if __name__ == "__main__":
    main(prog_name="mesp")
