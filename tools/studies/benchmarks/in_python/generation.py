"""Generates text with mlx-lm.

python -m studies.benchmarks.in_python.generation SETTINGS.json
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step

from mesp.bundle.reader import Bundle
from studies.benchmarks.footprint import Peak


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    mx.set_default_device(mx.cpu)
    peak = Peak()
    model = Bundle(settings["bundle"]).to_mlx_lm()
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    for line in sys.stdin:
        request = json.loads(line)
        written = []
        for prompt in request["prompts"]:
            steps = generate_step(mx.array(prompt), model, max_tokens=request["tokens"])
            written.append(sum(1 for _ in steps))
        print(json.dumps({"written": written, "peak_bytes": peak.bytes}), flush=True)


if __name__ == "__main__":
    main()
