import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

from mesp.bundle.manifest import read_manifest
from mesp.data.records import CHOSEN, REJECTED
from mesp.settings.train_settings import OBJECTIVES
from studies.benchmarks.cells import Cell, Row
from studies.benchmarks.processes import Bench


def preferences_rows(bench: Bench) -> Iterator[Row]:
    return itertools.chain.from_iterable(measure_objectives(bench, each) for each in bench.cells())


def measure_objectives(bench: Bench, cell: Cell) -> Iterator[Row]:
    """Yields a row for supervised steps, and a row for each preference objective.

    DPO has a second row with block inputs on disk. Each run makes two passes over its pairs. In the
    second pass, objectives with a reference model reuse its log-likelihoods.
    """
    steps, supervised = bench.steps, {}
    variants = [(objective, "", {}) for objective in (None, *OBJECTIVES)]
    variants.insert(2, ("dpo", ", inputs on disk", {"offload": "inputs"}))
    folder = bench.work / f"{cell.bundle.stem}-pairs"
    for objective, kept, settings in variants:
        write_pairs(cell, steps, folder, objective is not None)
        settings |= {"objective": objective} if objective else {"max_grad_norm": 1.0}
        settings |= {"batch_size": 2} if objective == "kto" else {}
        settings |= {"data": str(folder), "steps": 2 * steps, "optimizer": "adamw8bit"}
        run = bench.run(cell, "preferences", **settings)
        # The first step maps the files into memory, so it is not counted.
        first, second = run.steps[1:steps], run.steps[steps:]
        seconds = median(step["seconds"] for step in second)
        row = cell.row() | {
            "objective": objective or "supervised",
            "variant": (objective or "supervised") + kept,
            "seconds": seconds,
            "footprint_peak_bytes": run.peak_bytes,
            "predicted_peak_bytes": run.plan["predicted_peak_bytes"],
        }
        supervised = supervised or row
        before, alone = median(step["seconds"] for step in first), supervised["seconds"]
        peak_of = run.peak_bytes / supervised["footprint_peak_bytes"]
        yield row | {
            "time_of_supervised": seconds / alone if objective else None,
            "reference_time": (before - seconds) / alone if objective else None,
            "peak_of_supervised": peak_of if objective else None,
        }


def write_pairs(cell: Cell, count: int, folder: Path, labelled: bool) -> None:
    """Writes a data folder with `count` pairs of random answers.

    Each prompt with its answer fills a sequence, and half of it is the prompt. Without `labelled`,
    the answers are ordinary examples.
    """
    length, vocabulary = cell.seq_len + 1, read_manifest(cell.bundle).architecture.vocab_size
    examples = np.arange(2 * count, dtype="<u4")[:, None] * length
    examples = np.concatenate([examples, np.full_like(examples, length)], axis=1)
    tokens = np.random.default_rng(0).integers(vocabulary, size=2 * count * length, dtype="<u4")
    mask = np.tile(np.arange(length) > length // 2, 2 * count).astype(np.uint8)
    labels = np.tile(np.array([CHOSEN, REJECTED], np.uint8), count)
    files = {"tokens": tokens, "examples": examples.astype("<u4"), "mask": mask, "labels": labels}
    folder.mkdir(exist_ok=True)
    for name, array in files.items():
        (folder / f"{name}.bin").write_bytes(array.tobytes())
    entry = {"file": "tokens.bin", "tokens": len(tokens), "mask": "mask.bin"}
    entry["examples"] = {"file": "examples.bin", "count": 2 * count}
    entry |= {"labels": "labels.bin"} if labelled else {}
    (folder / "data.json").write_text(json.dumps({"train": entry}), encoding="utf-8")
