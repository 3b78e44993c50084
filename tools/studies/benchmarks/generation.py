"""Measures how many tokens per second programs generate, or MeSP with several adapters."""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mesp.bundle.manifest import read_manifest
from mesp.bundle.reader import Bundle
from mesp.errors import MespError
from studies.benchmarks.cells import Cell, Row
from studies.benchmarks.processes import (
    Bench,
    blas_threads,
    engine_program,
    environment,
    find_openblas,
)
from studies.in_peft.inputs import first_adapters

ROUNDS = 5  # measured rounds, each with all cases
TOGETHER = 8
ADAPTERS = (0, 1, 2, 4)  # numbers of adapters


class Use(NamedTuple):
    seconds: float
    cpu_seconds: float | None
    peak_bytes: int
    adapter_bytes: int


class Writer:
    def __init__(self, process: subprocess.Popen[str], is_engine: bool) -> None:
        self.process, self.is_engine = process, is_engine

    def write(self, prompts: list[list[int]], tokens: int) -> Use:
        began, cpu = time.perf_counter(), self._cpu_seconds()
        peak, adapters = (
            self._ask_engine(prompts, tokens) if self.is_engine else (self._ask(prompts, tokens), 0)
        )
        after = self._cpu_seconds()
        used = None if cpu is None or after is None else after - cpu
        return Use(time.perf_counter() - began, used, peak, adapters)

    def _ask(self, prompts: list[list[int]], tokens: int) -> int:
        self._send({"prompts": prompts, "tokens": tokens})
        answer = self._receive()
        if answer["written"] != [tokens] * len(prompts):
            raise MespError(f"{answer['written']} tokens were written in place of {tokens} each.")
        return answer["peak_bytes"]

    def _ask_engine(self, prompts: list[list[int]], tokens: int) -> tuple[int, int]:
        how = {"max_tokens": tokens, "temperature": 0, "top_p": 1, "seed": 0, "stop": []}
        requests = [{"prompt": prompt, **how} for prompt in prompts]
        self._send({"type": "generate", "at_once": len(prompts), "requests": requests})
        ended, peak, adapters = 0, 0, 0
        while ended < len(prompts):
            record = self._receive()
            if record["type"] == "token":
                self._send(True)
            else:
                ended, peak = ended + 1, max(peak, record["footprint_peak_bytes"])
                adapters = record["adapter_bytes"]
        return peak, adapters

    def _send(self, request: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)

    def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("{"):  # Libraries may print other lines.
                return json.loads(line)
        raise MespError("A process that generates ended early.")

    def _cpu_seconds(self) -> float | None:
        path = Path(f"/proc/{self.process.pid}/stat")
        if not path.exists():
            return None
        user, system = path.read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def running(
    command: list[str | Path], settings: dict[str, Any], work: Path, threads: int, preload: str = ""
) -> Iterator[Writer]:
    variables = environment(threads) | ({"LD_PRELOAD": preload} if preload else {})
    with TemporaryDirectory(prefix="run-", dir=work.resolve()) as folder:
        path = Path(folder, "settings.json")
        path.write_text(json.dumps(settings), encoding="utf-8")
        with subprocess.Popen(
            [*command, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, encoding="utf-8", env=variables,
        ) as process:  # fmt: skip
            try:
                yield Writer(process, is_engine=command[1] == "evaluate")
            finally:
                process.kill()


def generation_rows(bench: Bench) -> Iterator[Row]:
    cells, models = bench.cells(), bench.options["models"]
    for (index, cell), threads in with_threads(bench, enumerate(cells)):
        model = models[index * len(models) // len(cells)]
        gguf = Path(model) if model.endswith(".gguf") else None
        yield from measure_generation(bench, cell, gguf, threads)


def adapters_rows(bench: Bench) -> Iterator[Row]:
    for cell, threads in with_threads(bench, bench.cells()):
        yield from measure_adapters(bench, cell, threads)


def with_threads(bench: Bench, cells: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    return itertools.product(cells, bench.options["threads"] or (blas_threads(),))


def measure_generation(bench: Bench, cell: Cell, gguf: Path | None, threads: int) -> Iterator[Row]:
    """Yields rows for generation of a number of tokens after prompts of the cell's sequence length.

    One text is generated alone and, except with mlx-lm, eight in a batch. The programs alternate,
    so that a slow minute affects all of them.
    """
    bundle, llama = str(cell.bundle.resolve()), bench.options["llama"]
    engine: list[str | Path] = [engine_program(), "evaluate"]
    python: list[str | Path] = [sys.executable, "-m", "studies.benchmarks.in_python.generation"]
    with ExitStack() as stack:

        def start(command: list[str | Path], settings: dict[str, Any], preload: str = "") -> Writer:
            return stack.enter_context(running(command, settings, bench.work, threads, preload))

        mesp = start(engine, {"bundle": bundle, "adapters": []})
        writers = {("mesp", 1): mesp, ("mesp", TOGETHER): mesp}
        writers[("mlx-lm", 1)] = start(python, {"bundle": bundle}, find_openblas() or "")
        if gguf and llama:
            for at_once in (1, TOGETHER):
                settings = {"gguf": str(gguf.resolve()), "at_once": at_once, "threads": threads}
                settings |= {"context": cell.seq_len + bench.steps + 8}
                command = [llama.absolute(), "-m", "studies.in_llama.generate"]
                writers[("llama.cpp", at_once)] = start(command, settings)
        uses = _measure(bench, cell, writers)
    alone: dict[str, float] = {}
    for (name, at_once), pairs in uses.items():
        row = _row(cell, at_once, bench.steps, threads, pairs) | {"variant": name}
        alone.setdefault(name, row["decoded_per_second"])
        yield row | {"to_one": row["decoded_per_second"] / alone[name]}


def measure_adapters(bench: Bench, cell: Cell, threads: int) -> Iterator[Row]:
    """Yields a row for the generation of one text with each number of adapters in ADAPTERS. The
    measurements alternate.

    All adapters have the engine's initial values for the cell's rank.
    """
    bundle = str(cell.bundle.resolve())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="adapters-", dir=bench.work)))
        write_adapters(folder, cell)
        each = {"folder": str(folder.resolve()), "weight": 1 / max(ADAPTERS)}
        writers = {
            (str(count), 1): stack.enter_context(
                running(
                    [engine_program(), "evaluate"],
                    {"bundle": bundle, "adapters": [each] * count}, bench.work, threads,
                )
            )
            for count in ADAPTERS
        }  # fmt: skip
        uses = _measure(bench, cell, writers)
    rows = {count: _row(cell, 1, bench.steps, threads, uses[str(count), 1]) for count in ADAPTERS}
    for count, row in rows.items():
        measured = row["footprint_peak_bytes"] - rows[0]["footprint_peak_bytes"]
        predicted = max(use.adapter_bytes for pair in uses[str(count), 1] for use in pair)
        yield row | {
            "adapters": count,
            "to_base": row["decoded_per_second"] / rows[0]["decoded_per_second"],
            "beyond_base_bytes": measured if count else None,
            "adapter_bytes": predicted,
            "prediction_error": predicted / measured - 1 if count else None,
        }


def write_adapters(folder: Path, cell: Cell) -> None:
    config = {
        "fine_tune_type": "lora",
        "num_layers": cell.blocks,
        "lora_parameters": {"rank": cell.rank, "scale": 2.0, "dropout": 0.0},
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    arrays = first_adapters(Bundle(cell.bundle), cell.rank, seed=0)
    mx.save_safetensors(str(folder / "adapters.safetensors"), arrays)


def _measure(
    bench: Bench, cell: Cell, writers: dict[tuple[str, int], Writer]
) -> dict[tuple[str, int], list[tuple[Use, Use]]]:
    vocabulary = read_manifest(cell.bundle).architecture.vocab_size
    random, tell = np.random.default_rng(0), bench.doing(cell, "writing")
    uses: dict[tuple[str, int], list[tuple[Use, Use]]] = {key: [] for key in writers}
    for index in range(ROUNDS + 1):  # The first round warms up.
        for (name, at_once), writer in writers.items():
            prompts = random.integers(vocabulary, size=(at_once, cell.seq_len)).tolist()
            use = (writer.write(prompts, 1), writer.write(prompts, 1 + bench.steps))
            if index:
                uses[name, at_once].append(use)
        tell(index)
    return uses


def _row(cell: Cell, at_once: int, tokens: int, threads: int, pairs: list[tuple[Use, Use]]) -> Row:
    prompt = median(first.seconds for first, _ in pairs)
    decoding = median(whole.seconds - first.seconds for first, whole in pairs)
    row = cell.row() | {
        "texts": at_once,
        "threads": threads,
        "rounds": len(pairs),
        "prompt_per_second": at_once * cell.seq_len / prompt,
        "decoded_per_second": at_once * tokens / decoding,
        "prompt_cpu_seconds": None,
        "decoded_cpu_seconds": None,
        "footprint_peak_bytes": max(use.peak_bytes for pair in pairs for use in pair),
    }
    if pairs[0][0].cpu_seconds is not None:
        prompt_cpu = median(first.cpu_seconds for first, _ in pairs)
        whole_cpu = median(whole.cpu_seconds - first.cpu_seconds for first, whole in pairs)
        row["prompt_cpu_seconds"] = prompt_cpu / (at_once * cell.seq_len)
        row["decoded_cpu_seconds"] = whole_cpu / (at_once * tokens)
    return row
