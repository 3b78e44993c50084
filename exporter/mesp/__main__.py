"""`mesp COMMAND`, or `python -m mesp COMMAND`: every command of the package under one name."""

from __future__ import annotations

from importlib import import_module

import click

import mesp

NAMES = ("export", "data", "train", "generate", "evaluate", "fuse", "federate")


class Commands(click.Group):
    """A command is imported when it is asked for: MLX takes a while."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(NAMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return import_module(f"mesp.commands.{cmd_name}").main if cmd_name in NAMES else None


@click.command(cls=Commands, name="mesp")
@click.version_option(mesp.__version__, message="mesp %(version)s")
def main() -> None:
    """Fine-tune quantized language models with LoRA, in tens of megabytes.

    COMMAND is mesp-COMMAND too, as in mesp-train.
    """


if __name__ == "__main__":
    main(prog_name="mesp")
