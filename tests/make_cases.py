"""Makes the cases that the Swift tests compare the trainer with the reference on.

    python tests/make_cases.py FOLDER

Each case is a folder with `bundle.mesp` and what tests/make_fixtures.py computes on it.
"""

import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import mlx.core  # noqa: F401, before OpenBLAS: the engine, which has that, is compared with another
import pytest

# isort: split
import make_fixtures
from conftest import (
    FAMILIES,
    TEXT,
    TINY,
    dequantize_once,
    run,
    write_mixed_model,
    write_model,
)

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


def make(folder: Path, name: str, config: dict, length: int, rank: int, *options: object) -> None:
    case = folder / name
    case.mkdir(parents=True)
    lengths = ("--seq-len", length, "--rank", rank)
    with tempfile.TemporaryDirectory() as source:
        write = write_mixed_model if name == "mixed" else write_model
        model = write(Path(source, "model"), config)
        text = Path(source, "text.txt")
        text.write_text(TEXT)
        files = ("--model", model, "--data", text, "--out", case / "bundle.mesp")
        done = run("export", *files, *lengths, *options)
        assert done.returncode == 0, done.stderr
    with pytest.MonkeyPatch.context() as patch:
        dequantize_once(patch)
        make_fixtures.main(list(map(str, (case / "bundle.mesp", case, *lengths))))


def main() -> None:
    # Not forked: MLX's threads would be missing.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for made in [pool.submit(make, Path(sys.argv[1]), *case) for case in CASES]:
            made.result()


if __name__ == "__main__":
    main()
