"""Trains with PEFT what a run of the engine trained."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from mesp import reference
from mesp.bundle.reader import Bundle
from mesp.runs.log import RunLog
from studies.benchmarks.processes import blas_threads, environment, run_program
from studies.in_peft.inputs import first_adapters, write_inputs


def learn_with_peft(python: Path, bundle: Bundle, run: RunLog, out: Path, **more: Any) -> RunLog:
    """Trains as `run` did, unless the folder `out` has the result. The adapters are in its folder
    `adapters`.
    """
    log = out / "steps.json"
    if not log.exists():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        seed, rank = run.settings["seed"], run.settings["rank"]
        steps = batches(bundle, seed, run.settings["steps"], run.settings["batch_size"])
        write_inputs(out, bundle, first_adapters(bundle, rank, seed), steps)
        more |= {name: run.settings[name] for name in ("rank", "alpha", "learning_rate")}
        more |= {"dtype": "float32", "optimizer": "adamw", "output": str(out.resolve())}
        # absolute() keeps symbolic links, by which Python finds its virtual environment.
        command: list[str | Path] = [python.absolute(), "-m", "studies.in_peft.train"]
        done = run_program(command, more, out, lambda _: None, environment(blas_threads()))
        log.write_text(json.dumps(done.steps))
    return RunLog.of(json.loads(log.read_text()))


def batches(bundle: Bundle, seed: int, steps: int, size: int) -> np.ndarray:
    """Returns the tokens of the engine's steps, int32 [steps, size, tokens]: ~id if not in the
    loss.
    """
    tokens, examples, mask = bundle.tokens("train"), bundle.examples("train"), bundle.mask("train")
    assert examples is not None and mask is not None
    found = np.full((steps * size, examples[:, 1].max()), ~0, np.int32)
    for row, into in enumerate(found):
        start, length = examples[reference.step_window(row, seed, len(examples))]
        ids = tokens[start : start + length].astype(np.int32)
        into[:length] = np.where(mask[start : start + length], ids, ~ids)
    return found.reshape(steps, size, -1)
