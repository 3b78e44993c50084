"""Records the run that the app shows where it cannot train, for example in the simulator.

The log gets neither the machine's name nor the paths of folders.
"""

import json
import tempfile
from pathlib import Path

import mesp
from mesp.runs.log import LOG_NAME

HOME = Path(__file__).resolve().parents[1] / "ios" / "MeSPTrainer"
STEPS = 60


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="mesp-record-") as folder:
        output = Path(folder) / "run"
        mesp.train(HOME / "Demo.mesp", out=output, steps=STEPS, seq_len=128, eval_every=20)
        records = [json.loads(line) for line in (output / LOG_NAME).read_text().splitlines()]
    start = records[0]
    start["host"] = "recorded"
    start["settings"] |= {"bundle": "Demo.mesp", "output": "Recorded"}
    target = HOME / "Recorded" / LOG_NAME
    target.parent.mkdir(exist_ok=True)
    lines = [json.dumps(record, separators=(",", ":")) + "\n" for record in records]
    target.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
