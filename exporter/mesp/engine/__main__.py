from __future__ import annotations

import logging
import sys

from mesp.engine import build
from mesp.errors import MespError


def main() -> None:
    """Builds or finds mesp-engine and prints its path. With the argument mesp-count, does so for
    mesp-count.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    is_counter = sys.argv[1:] == [build.COUNTER.name]
    try:
        if sys.argv[1:] == ["--mlx"]:
            print(build.mlx_folder())
        elif build.has_sources(build.CHECKOUT):
            print(build.build_program(program=build.COUNTER if is_counter else build.ENGINE))
        else:
            print(build.find_counter() if is_counter else build.find_engine())
    except MespError as error:
        sys.exit(f"Error: {error.message}")


if __name__ == "__main__":
    main()
