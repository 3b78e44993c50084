"""Records the run that the app shows where it cannot train, for example in the simulator.

The log gets neither the machine's name nor the paths of folders.
"""

import json
import tempfile
from contextlib import suppress
from pathlib import Path

from mesp.commands.train import main as train
from mesp.runs.log import LOG_NAME

HOME = Path(__file__).resolve().parents[1] / "ios" / "MeSPTrainer"
STEPS = 60


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="mesp-record-") as folder:
        output = Path(folder) / "run"
        options = {"--steps": STEPS, "--seq-len": 128, "--eval-every": 20, "--out": output}
        words = [str(word) for option in options.items() for word in option]
        with suppress(SystemExit):  # a command ends with SystemExit
            train([str(HOME / "Demo.mesp"), *words], standalone_mode=False)
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
