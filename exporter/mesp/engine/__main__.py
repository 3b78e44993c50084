from __future__ import annotations

import logging
import sys

from mesp.engine.build import (
    CHECKOUT,
    COUNTER,
    ENGINE,
    build_program,
    find_counter,
    find_engine,
    has_sources,
    mlx_folder,
)
from mesp.errors import MespError


def main() -> None:
    """Builds or finds mesp-engine and prints its path. With the argument mesp-count, does so for
    mesp-count.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        if sys.argv[1:] == ["--mlx"]:
            print(mlx_folder())
        elif has_sources(CHECKOUT):
            program = COUNTER if sys.argv[1:] == [COUNTER.name] else ENGINE
            print(build_program(program=program))
        else:
            print(find_counter() if sys.argv[1:] == [COUNTER.name] else find_engine())
    except MespError as error:
        sys.exit(f"Error: {error.message}")


if __name__ == "__main__":
    main()
