"""`python -m mesp.engine` builds the engine (`make engine`)."""

from __future__ import annotations

import click

from mesp.engine.build import CHECKOUT, build_engine, find_engine, has_sources, mlx_folder


@click.command()
@click.option(
    "--mlx",
    is_flag=True,
    help="Only print the folder of the mlx package that the engine is built with.",
)
def main(mlx: bool) -> None:
    """Build mesp-engine and print where it is."""
    if mlx:
        click.echo(mlx_folder())
    else:
        click.echo(build_engine() if has_sources(CHECKOUT) else find_engine())


if __name__ == "__main__":
    main()
