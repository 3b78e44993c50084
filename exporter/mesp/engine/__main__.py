"""`python -m mesp.engine` builds the engine (`make engine`)."""

from __future__ import annotations

import logging
import sys

from mesp.engine.build import CHECKOUT, build_engine, find_engine, has_sources, mlx_folder
from mesp.errors import MespError


def main() -> None:
    """Builds mesp-engine and prints where it is; with --mlx only prints the folder of the mlx
    package that the engine is built with."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        if sys.argv[1:] == ["--mlx"]:
            print(mlx_folder())
        else:
            print(build_engine() if has_sources(CHECKOUT) else find_engine())
    except MespError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
