"""Makes the cases that the Swift tests compare the trainer with the reference on.

    python tests/make_cases.py FOLDER

Each case is a folder with `bundle.mesp` and what tests/make_fixtures.py computes on it.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from conftest import TEXT, TINY, write_model

UNTIED = {**TINY, "num_hidden_layers": 2, "tie_word_embeddings": False, "rope_theta": 1e6}
CASES = [("tied-32", TINY, 32, 8), ("tied-7", TINY, 7, 4), ("untied-7", UNTIED, 7, 4)]


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    export = Path(sys.executable).with_name("mesp-export")
    make_fixtures = Path(__file__).with_name("make_fixtures.py")
    for name, config, length, rank in CASES:
        case = Path(sys.argv[1], name)
        lengths = ("--seq-len", length, "--rank", rank)
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(Path(folder, "model"), config)
            text = Path(folder, "text.txt")
            text.write_text(TEXT)
            case.mkdir(parents=True)
            run(export, "--model", model, "--data", text, "--out", case / "bundle.mesp", *lengths)
        run(sys.executable, make_fixtures, case / "bundle.mesp", case, *lengths)


if __name__ == "__main__":
    main()
