"""Makes the cases that the Swift tests compare the trainer with the reference on.

    python tests/make_cases.py FOLDER

Each case is a folder with `bundle.mesp` and what tests/make_fixtures.py computes on it.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from conftest import FAMILIES, TEXT, TINY, write_mixed_model, write_model

UNTIED = {**TINY, "num_hidden_layers": 2, "tie_word_embeddings": False, "rope_theta": 1e6}
# Name, config.json, length, rank, and more options of mesp-export.
CASES = [
    ("tied-32", TINY, 32, 8),
    ("tied-7", TINY, 7, 4),
    ("untied-7", UNTIED, 7, 4),
    ("qwen3", FAMILIES["qwen3"], 7, 4, "--group-size", 32),
    ("llama3", FAMILIES["llama"], 20, 4),
    ("smollm3", FAMILIES["smollm3"], 9, 2, "--bits", 8),
    ("mistral", FAMILIES["mistral"], 12, 4),
    ("gemma3", FAMILIES["gemma3_text"], 32, 4),
    ("gemma2", FAMILIES["gemma2"], 9, 4, "--group-size", 32),
    ("phi3", FAMILIES["phi3"], 16, 4),
    ("mixed", {**TINY, "tie_word_embeddings": False}, 9, 4),
    ("mxfp4", TINY, 9, 4, "--mode", "mxfp4"),
    ("nvfp4", FAMILIES["phi3"], 9, 4, "--mode", "nvfp4"),
    ("mxfp8", FAMILIES["qwen3"], 9, 4, "--mode", "mxfp8"),
    ("gemma2-bfloat16", FAMILIES["gemma2"], 9, 4, "--dtype", "bfloat16"),
    ("qwen3-bfloat16", FAMILIES["qwen3"], 9, 4, "--mode", "mxfp4", "--dtype", "bfloat16"),
]


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    export = Path(sys.executable).with_name("mesp-export")
    make_fixtures = Path(__file__).with_name("make_fixtures.py")
    for name, config, length, rank, *options in CASES:
        case = Path(sys.argv[1], name)
        lengths = ("--seq-len", length, "--rank", rank)
        with tempfile.TemporaryDirectory() as folder:
            write = write_mixed_model if name == "mixed" else write_model
            model = write(Path(folder, "model"), config)
            text = Path(folder, "text.txt")
            text.write_text(TEXT)
            case.mkdir(parents=True)
            out = ("--out", case / "bundle.mesp")
            run(export, "--model", model, "--data", text, *out, *lengths, *options)
        run(sys.executable, make_fixtures, case / "bundle.mesp", case, *lengths)


if __name__ == "__main__":
    main()
