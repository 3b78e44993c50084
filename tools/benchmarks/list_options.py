"""A command whose options may be given several values."""

from __future__ import annotations

import click

from mesp.commands.command import Command


class ListOptions(Command):
    """``--rank 4 8`` is ``--rank 4 --rank 8``. It has no arguments, which would be taken for more
    of the option before them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        repeatable = {o for p in self.params if getattr(p, "multiple", False) for o in p.opts}
        spelled, current = [], None
        for arg in args:
            if arg.startswith("-"):
                current = arg if arg in repeatable else None
            elif current and spelled[-1] != current:
                spelled.append(current)
            spelled.append(arg)
        return super().parse_args(ctx, spelled)
