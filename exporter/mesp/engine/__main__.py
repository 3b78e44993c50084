"""`python -m mesp.engine` builds the engine (`make engine`)."""

from __future__ import annotations

import click

from mesp.engine.build import build_engine, mlx_folder


@click.command()
@click.option(
    "--mlx",
    is_flag=True,
    help="Only print the folder of the mlx package that the engine is built with.",
)
def main(mlx: bool) -> None:
    """Build mesp-engine and print where it is."""
    click.echo(mlx_folder() if mlx else build_engine())


if __name__ == "__main__":
    main()
