"""Runs a measurement of tools/bench.py in Python, without the engine.

    python -m studies.benchmarks.in_python SETTINGS.json

Prints records of types `start`, `step` and `event` as JSON, one per line. All computation is in
float32 on the CPU. Sizes are in bytes, times in seconds.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx

from mesp.bundle.reader import Bundle
from studies.benchmarks.in_python.mezo_estimate import mezo_quality
from studies.benchmarks.in_python.mlx_lm_trainer import mlx_lm
from studies.benchmarks.in_python.papers_way import paper
from studies.benchmarks.in_python.products import products
from studies.benchmarks.in_python.recomputing_h import h

KINDS = {"paper": paper, "mlx-lm": mlx_lm, "h": h, "mezo-quality": mezo_quality}
KINDS |= {"products": products}


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    mx.set_default_device(mx.cpu)
    bundle = Bundle(settings["bundle"])
    settings["scale"] = settings["alpha"] / settings["rank"]
    KINDS[settings["kind"]](bundle, settings)


if __name__ == "__main__":
    main()
