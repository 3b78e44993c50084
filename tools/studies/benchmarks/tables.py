import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import click
import numpy as np

from mesp import reference
from mesp.bundle.data_files import replace_data
from mesp.bundle.export_options import BundleOptions
from mesp.bundle.manifest import read_manifest
from mesp.bundle.rewriter import rewrite_bundle
from mesp.data.splits import Split
from mesp.engine.process import find_count
from mesp.errors import MespError
from mesp.settings.optimizer_defaults import choose_learning_rate, choose_optimizer
from studies.benchmarks import paper
from studies.benchmarks.bits import HELD, QUANTIZATIONS, bits_rows
from studies.benchmarks.cells import Cell, Row, without_functions
from studies.benchmarks.columns import SIZE, grouped
from studies.benchmarks.generation import adapters_rows, generation_rows
from studies.benchmarks.preferences import preferences_rows
from studies.benchmarks.processes import Bench, blas_threads, engine_settings, run_python
from studies.benchmarks.rows import ROUNDS, compare, extrapolate, measure, peaks
from studies.benchmarks.variants import ENGINE_METHODS, PEFT_METHODS, Variant, find_variants

SIZES = tuple(paper.PEAK_MB)
MODELS = (*SIZES, "Llama-3.2-1B", "Llama-3.2-3B", "Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B",
          "SmolLM2-135M", "SmolLM2-360M", "SmolLM2-1.7B", "Gemma-3-1B")  # fmt: skip
HYBRIDS = ("Qwen3.5-0.8B", "Qwen3.5-2B", "Qwen3.5-4B", "LFM2-350M", "LFM2-700M", "LFM2-1.2B",
           "LFM2.5-8B-A1B", "LFM3-1.7B", "Granite-4.0-H-350M", "Granite-4.0-H-1B", "Gemma-4-E2B",
           "Gemma-4-E4B")  # fmt: skip

# MeZO's noisy estimates would make its loss diverge at the exact methods' learning rate.
CONVERGENCE_RATES = {"mesp": 0.1, "mebp": 0.1, "mezo": 1e-4}
CONVERGENCE_REPORTS = 10
PARTS: dict[str, dict[str, Any]] = {
    "all": {},
    "q,v": {"projections": ["q", "v"]},
    "B alone": {"freeze_a": True},
    "B of q,v": {"projections": ["q", "v"], "freeze_a": True},
    "DoRA": {"dora": True},
    "half of the blocks a step": {"blocks_per_step": 0.5},
    "a quarter of the blocks a step": {"blocks_per_step": 0.25},
}
VAL_BATCHES = 25
SGD_RATES = (1e-4, 0.1, 0.5)  # the paper's rate, mesp-train's default, and a higher one
AGREEMENT = 1e-4  # maximum relative difference between MeSP's and MeBP's losses

_SIZE = {"models": SIZES[:1], "seq_lens": (256,), "ranks": (paper.RANK,), "steps": 3}
_RUNS = {**_SIZE, "methods": ("mesp",), "layers": (), "offload": "auto", "limits": ("auto",),
         "threads": (), "peft": None}  # fmt: skip
_DEMO = {**_SIZE, "models": ("demo",)}
_GPU = {"models": SIZES[:1], "ranks": (paper.RANK,), "device": "gpu"}

RECORDS = 512

COUNTED = ("evals", "kernels", "tflop", "ledger_peak_bytes", "predicted_peak_bytes",
           "modelled_seconds", "new_buffer_bytes", "command_buffers", "spinning_seconds",
           "first_kernels", "most_first_kernels")  # fmt: skip

TABLES: dict[str, dict[str, Any]] = {
    "memory": {**_RUNS, "methods": ENGINE_METHODS},
    "length": {
        **_RUNS,
        "methods": ENGINE_METHODS,
        "models": MODELS,
        "seq_lens": tuple(paper.PEAK_MB[SIZES[0]]),
    },
    "families": {**_RUNS, "models": HYBRIDS, "seq_lens": (256, 1024), "offload": "each"},
    "rank": {**_RUNS, "models": SIZES, "ranks": (4, 8, 16, 32)},
    "time": {
        **_RUNS,
        "methods": ("mebp", "mesp", "mezo"),
        "limits": ("auto", "bar", "mebp", "all"),
    },
    "gpu": {**_GPU, "seq_lens": (256, 1024)},
    "functions": {**_GPU, "seq_lens": (64, 256)},
    "h": {**_SIZE, "models": SIZES, "steps": 10},
    "mezo-quality": {**_DEMO, "layers": (), "steps": 10},
    "preferences": {**_SIZE, "layers": (), "steps": 4},
    "parts": {**_SIZE, "layers": (), "steps": 2},
    "defaults": {**_DEMO, "seq_lens": (128,), "steps": 200, "data": None},
    "records": {**_DEMO, "seq_lens": (128, 256, 512), "layers": (), "steps": 60},
    "packing": {**_SIZE, "seq_lens": (64, 128, 256, 512), "steps": 24},
    "generation": {**_SIZE, "seq_lens": (128,), "steps": 128, "threads": (), "llama": None},
    "adapters": {**_SIZE, "seq_lens": (128,), "steps": 128, "threads": ()},
    "bits": {**_SIZE, "layers": (), "steps": 5, "quantizations": QUANTIZATIONS},
    "packing-gpu": {**_GPU, "seq_lens": (64, 128, 256, 512)},
    "convergence": {**_DEMO, "steps": 1000, "data": None, "learning_rate": None},
    "paper": {
        "models": SIZES[:1],
        "seq_lens": tuple(paper.PEAK_MB[SIZES[0]]),
        "ranks": (4, 8, 16, 32),
        "steps": 2,
    },
}


def run_rows(bench: Bench) -> Iterator[Row]:
    options, rows = bench.options, []
    names = ("methods", "limits", "offload", "threads")
    variants = find_variants(*(options[name] for name in names))
    if options["peft"] is None and PEFT_METHODS.keys() & {*options["methods"]}:
        raise MespError("torch-peft needs --peft, a Python with torch, peft and transformers.")
    for cell, variant in itertools.product(bench.cells(), variants):
        rows.append(measure(bench, cell, variant, rows))
        compare(rows)
        yield rows[-1]
    whole = bench.cells(whole=True) if len(bench.layers) > 1 else []
    for cell, variant in itertools.product(whole, variants):
        if row := extrapolate(cell, variant, rows):
            rows.append(row)
            compare(rows)
            yield row


def gpu_rows(bench: Bench) -> Iterator[Row]:
    return (count_step(bench, cell) for cell in bench.cells())


def count_step(bench: Bench, cell: Cell, **settings: float) -> Row:
    bench.doing(cell, "counting")
    count = find_count(engine_settings(cell, Variant("mesp")) | settings)
    row = cell.row() | {name: count[name] for name in COUNTED}
    row["moved_bytes"] = count["read_bytes"] + count["written_bytes"]
    for rules in ("fast", "strict", "slow"):
        row |= {f"{rules}_{name}": value for name, value in count[rules].items()}
    del row["cpu"], row["os"]  # The counts do not depend on this machine.
    return row


def functions_rows(bench: Bench) -> Iterator[Row]:
    for cell in bench.cells():
        bare = cell._replace(bundle=without_functions(cell.bundle, bench.work / "bare.mesp"))
        yield count_step(bench, cell) | {"forward_pass": "functions"}
        yield count_step(bench, bare) | {"forward_pass": "formulas"}
        yield count_step(bench, cell, dropout=0.1) | {"forward_pass": "dropout"}
        yield count_step(bench, cell, dora=True) | {"forward_pass": "dora"}


def python_rows(bench: Bench) -> Iterator[Row]:
    for cell in bench.cells():
        settings = {"kind": bench.table}
        for event in run_python(bench, cell, bench.table, settings, blas_threads()).events:
            del event["type"]
            yield {**cell.row(), **event}


def convergence_rows(bench: Bench) -> Iterator[Row]:
    for cell, method in itertools.product(bench.cells(), ENGINE_METHODS):
        rate = bench.options["learning_rate"] or CONVERGENCE_RATES[method]
        every = max(1, bench.steps // CONVERGENCE_REPORTS)
        settings = {"steps": bench.steps, "val_batches": VAL_BATCHES, "eval_every": every}
        run = bench.run(cell, method, method, learning_rate=rate, **settings)
        yield cell.row() | {
            "method": method,
            "variant": method,
            "data": bench.options["data"],
            "learning_rate": rate,
            "steps": len(run.steps),
            "losses": run.losses,
            "held_out": [[record["step"], record["loss"]] for record in run.evals],
        }


def defaults_rows(bench: Bench) -> Iterator[Row]:
    """Yields a row for each update of `sweep` at the first rank."""
    cells = itertools.groupby(bench.cells(), key=lambda cell: (cell.bundle, cell.seq_len))
    for (bundle, _), ranks in cells:
        width = read_manifest(bundle).architecture.hidden_size
        rate = choose_learning_rate("mesp", choose_optimizer("mesp"), width)
        updates, rows = sweep(rate, warmup=bench.steps // 10), []
        first, *others = ranks
        runs = [(first, name) for name in updates] + [(cell, "default") for cell in others]
        for cell, name in runs:
            update = updates[name]
            settings = update | {"steps": bench.steps, "val_batches": VAL_BATCHES}
            row = cell.row() | {"update": name, **update, "before": None, "after": None}
            try:
                row["before"], row["after"] = bench.run(cell, name, **settings).held_out
            except MespError as error:
                if "not finite" not in error.message:
                    raise
            rows.append(row)
        best = max((row["before"] - row["after"] for row in rows if row["after"]), default=None)
        for row in rows:
            drop = row["after"] and row["before"] - row["after"]
            yield row | {"of_best": drop and drop / best}


def sweep(rate: float, warmup: int) -> dict[str, dict[str, Any]]:
    def adamw(factor: float, **more: Any) -> dict[str, Any]:
        return {"optimizer": "adamw8bit", "learning_rate": factor * rate} | more

    sgd = {f"SGD at {each:g}": {"optimizer": "sgd", "learning_rate": each} for each in SGD_RATES}
    return {
        "default": adamw(1),
        "moments in 32 bits": adamw(1, optimizer="adamw"),
        "half the rate": adamw(0.5),
        "twice the rate": adamw(2),
        "twice, warm-up and decay": adamw(2, warmup=warmup, schedule="linear"),
        **sgd,
    }


def records_rows(bench: Bench) -> Iterator[Row]:
    """Yields a row for padded records, and a row for records at their own lengths.

    Padded records have the bundle's longest length. Otherwise a record has the shortest length that
    holds it.
    """
    lengths, longest = longest_cells(bench)
    for cell in longest:
        padded = None
        for these in (lengths[-1:], lengths):
            filled = with_records(cell, these, like_gsm8k(cell.seq_len), bench.work)
            what = f"records at {' or '.join(map(str, these))}"
            run = bench.run(filled, what, steps=bench.steps)
            speed = len(run.steps) / sum(step["seconds"] for step in run.steps)
            padded = padded or speed
            peak = max(step["footprint_peak_bytes"] for step in run.steps)
            yield cell.row() | peaks(peak, run.plan) | {
                "lengths": ", ".join(map(str, these)),
                "steps": len(run.steps),
                "records_per_second": speed,
                "to_padded": speed / padded,
                "losses": run.losses,
            }  # fmt: skip


def packing_rows(bench: Bench) -> Iterator[Row]:
    """Yields a row for steps of one short record each, and a row for the same records packed into
    sequences.

    An unpacked record has the shortest length that holds it. Packed sequences have the longest
    length.
    """
    (lengths, longest), sizes = longest_cells(bench), like_chat()
    for cell in longest:
        alone = None
        for these, pack in ((lengths[:-1], False), (lengths[-1:], True)):
            steps = max(1, bench.steps * sizes.mean() // lengths[-1]) if pack else bench.steps
            what = "packed records" if pack else "records one a step"
            filled = with_records(cell, these, sizes, bench.work, pack)
            run = bench.run(filled, what, steps=int(steps))
            counted = sum(step["tokens"] for step in run.steps)
            seconds = sum(step["seconds"] for step in run.steps)
            records = counted / (sizes - 2 * sizes // 5).mean()
            alone = alone or records / seconds
            yield cell.row() | {
                "lengths": "packed into " * pack + ", ".join(map(str, these)),
                "steps": len(run.steps),
                "records_per_second": records / seconds,
                "to_alone": records / seconds / alone,
                "footprint_peak_bytes": max(step["footprint_peak_bytes"] for step in run.steps),
                "predicted_peak_bytes": run.plan["predicted_peak_bytes"],
            }


def packing_gpu_rows(bench: Bench) -> Iterator[Row]:
    (*shorter, longest), cells = longest_cells(bench)
    sizes = like_chat()
    # The sizes of the records that run unpacked at each length. A record may have one token more
    # than the length, because its last token is only a target.
    alone = {n: sizes[(sizes <= n + 1) & (sizes > before + 1)]
             for before, n in zip([0, *shorter], shorter, strict=False)}  # fmt: skip
    alone = {n: these for n, these in alone.items() if len(these)}
    together = len(sizes) / len(reference.pack(sizes.tolist(), longest))

    def counts(cell: Cell, sizes: np.ndarray, seq_len: int, pack: bool = False) -> Row:
        filled = with_records(cell, [seq_len], sizes, bench.work, pack)
        return {name: value for name, value in count_step(bench, filled).items() if name in COUNTED}

    for cell in cells:
        # Records of the mean size represent all records of a length.
        each = {n: counts(cell, np.full(RECORDS, these.mean().round(), int), n)
                for n, these in alone.items()}  # fmt: skip
        share = {n: len(these) / len(sizes) for n, these in alone.items()}
        mean = {name: sum(share[n] * row[name] for n, row in each.items()) for name in COUNTED}
        for name in ("ledger_peak_bytes", "predicted_peak_bytes"):
            mean[name] = max(row[name] for row in each.values())
        packed = counts(cell, sizes, longest, pack=True)
        for text, row, records in (("", mean, 1.0), ("packed into ", packed, together)):
            these = [longest] if text else shorter
            per_second = records / row["modelled_seconds"]
            alone_per_second = 1 / mean["modelled_seconds"]
            row = cell.row() | row | {
                "lengths": text + ", ".join(map(str, these)),
                "records_per_second": per_second,
                "to_alone": per_second / alone_per_second,
            }  # fmt: skip
            del row["cpu"], row["os"]  # The counts do not depend on this machine.
            yield row


def longest_cells(bench: Bench) -> tuple[list[int], list[Cell]]:
    """Returns the table's lengths, ascending, and the cells of the longest."""
    lengths = sorted(set(bench.options["seq_lens"]))
    return lengths, [cell for cell in bench.cells() if cell.seq_len == lengths[-1]]


def like_chat() -> np.ndarray:
    """Returns random lengths of short chats: 40 to 120 tokens."""
    return np.random.default_rng(0).integers(40, 121, RECORDS)


def like_gsm8k(seq_len: int) -> np.ndarray:
    """Returns random lengths in tokens like those of GSM8K's problems: log-normal around 185."""
    lengths = np.random.default_rng(0).lognormal(np.log(185), 0.4, RECORDS)
    return np.clip(lengths.astype(int), 16, seq_len + 1)


def with_records(
    cell: Cell, lengths: list[int], sizes: np.ndarray, work: Path, pack: bool = False
) -> Cell:
    """Returns a cell of a copy of the cell's bundle, with only these sequence lengths, the last of
    which is the cell's, and with records of random tokens.

    The first two fifths of a record are its prompt.
    """
    these = "-".join(map(str, lengths))
    out = work / f"{cell.bundle.stem}-records-{these}{'-packed' * pack}.mesp"
    options = BundleOptions(out, lengths, [cell.rank], overwrite=True, pack=pack)
    manifest = rewrite_bundle(cell.bundle, options)
    random = np.random.default_rng(0)
    starts = np.cumsum(sizes) - sizes
    mask = np.ones(sizes.sum(), np.uint8)
    for start, size in zip(starts, sizes, strict=True):
        mask[start : start + 2 * size // 5] = 0
    vocab_size = manifest.architecture.vocab_size
    tokens = random.integers(vocab_size, size=len(mask), dtype=np.uint32)
    examples = np.stack([starts, sizes], axis=1).astype(np.uint32)
    replace_data(out, {"train": Split(tokens, examples, mask, pack=pack)})
    return cell._replace(bundle=out, seq_len=lengths[-1])


def parts_rows(bench: Bench) -> Iterator[Row]:
    """Yields a row for each choice of trained parameters, with the default optimizer.

    The runs alternate, so that a slow minute affects all of them.
    """
    for cell in bench.cells():
        runs: dict[str, list] = {name: [] for name in PARTS}
        for _, (name, part) in itertools.product(range(ROUNDS), PARTS.items()):
            turns = round(1 / part.get("blocks_per_step", 1))
            settings = part | {"steps": turns * bench.steps, "optimizer": choose_optimizer("mesp")}
            runs[name].append(bench.run(cell, f"training {name}", **settings))
        for name, each in runs.items():
            peak = median(run.peak_bytes for run in each)
            turns = len(each[0].steps) // bench.steps

            def seconds(key: str, each: list = each, turns: int = turns) -> float:
                later = [run.steps[turns:] or run.steps for run in each]
                return median(mean(step[key] for step in steps) for steps in later)

            yield cell.row() | peaks(peak, each[0].plan) | {
                "trained": name,
                "seconds": seconds("seconds"),
                "backward_seconds": seconds("backward_seconds"),
                "losses": each[0].losses,
            }  # fmt: skip


def largest_difference(rows: list[Row]) -> float:
    differences = [0.0]
    for cell in grouped(rows, SIZE):
        mesp, mebp = (r["losses"] + [loss for _, loss in r["held_out"]] for r in cell[:2])
        differences += [abs(a - b) / abs(b) for a, b in zip(mesp, mebp, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def check_agreement(rows: list[Row]) -> None:
    """Raises MespError if it exceeds AGREEMENT or is NaN."""
    largest = largest_difference(rows)
    click.echo(f"MeSP and MeBP: largest relative difference of a loss {largest:.1e}.")
    if not largest <= AGREEMENT:
        raise MespError(f"MeSP and MeBP differ by more than {AGREEMENT:g}: one of them is wrong.")


class Kind(NamedTuple):
    rows: Callable[[Bench], Iterator[Row]]
    ys: tuple[str, ...]
    note: str
    x: str | None = None  # None: the sequence length or, if only the rank varies, the rank


RUNS = Kind(
    run_rows,
    ("peak MB", "s/step"),
    f"""The paper's figures were measured on an iPhone 17 Pro, where its MeSP takes \
{paper.TIME_OF_MEBP} times as long as MeBP, and at rank 32 {paper.RANK_32_OF_RANK_4} times the \
memory of rank 4.
Net is the peak less the memory of Python and MLX before anything is loaded. The trainer uses
OpenBLAS; MLX's own BLAS is some 50 times slower. A row with "from blocks" has not been run, but is
extrapolated from runs of these numbers of blocks; its plan is that of all blocks. Products are only
those with frozen matrices, on NumPy's BLAS: a trainer can save no more than the rest of a step.""",
)
KINDS = {
    "gpu": Kind(
        gpu_rows,
        ("ledger peak MB", "modelled s"),
        """Nothing was run: these are counts of a step, the second, of MeSP with SGD on a phone's
GPU. Counted: evals (round trips), kernels, TFLOP (of matrix products and attention), the ledger's
peak (of MLX's arrays and its cache, without the process and the mapped weights), and the new
buffers, which the system makes and fills with zeros. The predicted peak is the planner's.
Polling is the longest time in which `eval` keeps a core busy. Fast, strict and slow use the
trainer's command buffers in place of MLX's. Fast: each is complete at once. Strict: none is
complete before it must be, and the last one's completion handlers are late. Slow: those of many are
late. Modelled: the seconds, from the counts and assumed speeds of a phone.
See docs/gpu.md.""",
    ),
    "functions": Kind(
        functions_rows,
        ("kernels", "ledger peak MB", "modelled s"),
        """The counts of the table gpu, of a bundle with block functions, of one without, whose
forward passes are the trainer's formulas, and with --dropout 0.1 and --dora, which take these too.
Moved: what kernels read and write.""",
    ),
    "h": Kind(
        python_rows,
        ("h of all MB", "share"),
        """MB would be added by storing h = xA of a block's modules in float32. Times are those of
one block, medians with mesp.reference; the gradient's includes recomputing its forward pass.""",
    ),
    "mezo-quality": Kind(
        python_rows,
        ("cosine", "equal signs", "relative error"),
        """Means over draws of z, with mesp.reference in float32, after some exact steps, because
A's gradient is zero for the initial B of zeros.""",
        x="layer",
    ),
    "generation": Kind(
        generation_rows,
        ("decoded tokens/s",),
        """Prompts of random tokens, and this many of the likeliest tokens after them; medians of
rounds that alternate. CPU: user and system time of all threads. llama.cpp multiplies with
activations in 8 bits, the others in float32. mlx-lm's linear layers are MLX's own.""",
    ),
    "adapters": Kind(
        adapters_rows,
        ("decoded tokens/s",),
        """Prompts of random tokens, and this many of the likeliest tokens after them, with several
adapters at once; medians of rounds that alternate. Beyond none: the peak less that of the base
model.
Predicted: the adapters' matrices.""",
    ),
    "bits": Kind(
        bits_rows,
        ("peak MB", "s/step"),
        f"""Steps by MeSP with SGD on random weights, all matrices quantized to the bits and groups
in the name: medians of runs that alternate. Of 4 bits: relative to the first line. CPU: time of all
threads, with the program's start. Of memory: in a control group that holds {HELD:.0%} of the bytes
of 4 bits, with the cache of the files; the files were not in memory before. Read: from the disk, a
step.""",
    ),
    "preferences": Kind(
        preferences_rows,
        ("s/step",),
        """A step of an objective has a pair of answers, or for kto two answers. Each is as long as
a sequence, and half of it is prompt. Of supervised: relative to a step with one of these sequences,
whose gradients are summed to be clipped. First: the added time when a pair is read for the first
time, for the first model's likelihoods.""",
    ),
    "parts": Kind(
        parts_rows,
        ("peak MB",),
        f"""Steps by MeSP with the default optimizer: medians of {ROUNDS} runs, which alternate.""",
    ),
    "defaults": Kind(
        defaults_rows,
        ("after",),
        """Held-out nats a token before and after, and the drop as a share of the model's largest.
Where there is no loss, one was not finite.""",
        x="learning rate",
    ),
    "records": Kind(
        records_rows,
        ("records/s",),
        """Records of chat as long as GSM8K's, one a step, by MeSP with SGD: padded to the longest
length, and each at the shortest that holds it. The losses are the same.""",
    ),
    "packing": Kind(
        packing_rows,
        ("records/s",),
        """Records of chat of 40 to 120 tokens, by MeSP with SGD: one a step, each at the shortest
length that holds it, and packed into one sequence a step.""",
    ),
    "packing-gpu": Kind(
        packing_gpu_rows,
        ("kernels", "evals", "modelled s", "records/s"),
        """The table packing on a phone's GPU, with the ledger's model of the time (docs/gpu.md).
Counts of unpacked records are means over steps, and the peak is the largest.""",
    ),
    "convergence": Kind(
        convergence_rows,
        ("held-out loss",),
        "Nats a token, with SGD. Training: the mean since the method's previous line.",
        x="step",
    ),
}
