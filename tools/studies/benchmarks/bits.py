import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from mesp.errors import MespError
from mesp.runs.log import RunLog
from studies.benchmarks.cells import Cell, Row
from studies.benchmarks.processes import Bench, engine_program, engine_settings, run_program
from studies.benchmarks.rows import ROUNDS, peaks
from studies.benchmarks.variants import Variant

# Bits and group sizes.
QUANTIZATIONS = ((4, 64), (3, 64), (2, 64), (2, 128))
GROUPS = Path("/sys/fs/cgroup")
# The memory limit of a control group, as a share of the bytes of the reference's weights.
HELD = 0.75
# A shell command that joins a control group and then runs a program in the same process.
JOIN = ("sh", "-c", 'echo $$ > "$0" && exec "$@"')


def bits_rows(bench: Bench) -> Iterator[Row]:
    cells = bench.cells()
    sizes = len(bench.options["seq_lens"]) * len(bench.options["ranks"])
    of_model = sizes * len(bench.options["quantizations"])
    for start in range(0, len(cells), of_model):
        for size in range(sizes):
            yield from measure_bits(bench, cells[start : start + of_model][size::sizes])


def measure_bits(bench: Bench, cells: list[Cell]) -> Iterator[Row]:
    """Yields up to three rows for each cell: without offloading, with everything offloaded to disk,
    and with everything offloaded in a control group.

    The control group has less memory than the first quantization's weights take.
    """
    runs: dict[tuple[Cell, str], list[tuple[RunLog, float, int]]] = {}
    steps, engine = bench.steps, engine_program()
    for _ in range(min(ROUNDS, steps)):
        held = 0
        for cell in cells:
            for offload in ("none", "all"):
                variant = Variant("mesp", offload=offload)
                settings = engine_settings(cell, variant) | {"steps": steps}
                run = run_and_count(bench, cell, [engine], settings)
                runs.setdefault((cell, str(variant)), []).append(run)
            held = held or int(HELD * run[0].plan["mapped_bytes"])
            if limit_file():
                forget(cell.bundle)
                with control_group(held) as members:
                    run = run_and_count(bench, cell, [*JOIN, members, engine], settings)
                name = f"{variant}, {held / 1e6:.0f} MB of memory"
                runs.setdefault((cell, name), []).append(run)
    first: dict[str, Row] = {}
    for (cell, name), each in runs.items():
        logs = [log for log, _, _ in each]
        peak = median(log.peak_bytes for log in logs)
        plan = logs[0].plan
        row = cell.row() | {
            "variant": name,
            "seconds": median(s["seconds"] for log in logs for s in log.steps[1:] or log.steps),
            "cpu_seconds": median(cpu for _, cpu, _ in each) / steps,
            **peaks(peak, plan),
            "mapped_bytes": plan["mapped_bytes"],
            "read_bytes": median(read for _, _, read in each) / steps,
            "written_bytes": median(s["written_bytes"] for log in logs for s in log.steps),
            "losses": logs[0].losses,
        }
        four = first.setdefault(name, row)
        row["peak_to_first_bits"] = peak / four["footprint_peak_bytes"]
        row["time_to_first_bits"] = row["seconds"] / four["seconds"]
        yield row


def run_and_count(
    bench: Bench, cell: Cell, command: list[str | Path], settings: dict[str, Any]
) -> tuple[RunLog, float, int]:
    """Returns its log, its processor time in seconds, and the bytes that it read from disks."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = run_program(command, settings, bench.work, bench.doing(cell, "fewer bits"))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return run, cpu, 512 * (after.ru_inblock - before.ru_inblock)


def forget(folder: Path) -> None:
    """Removes a folder's files from the system's cache.

    Otherwise a control group would not count these files as its own memory.
    """
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def limit_file() -> Path | None:
    for parent, name in ((GROUPS / "memory", "memory.limit_in_bytes"), (GROUPS, "memory.max")):
        if (parent / "cgroup.procs").exists() and os.access(parent, os.W_OK):
            return parent / f"mesp-bench-{os.getpid()}" / name
    return None


@contextmanager
def control_group(limit: int) -> Iterator[Path]:
    """Creates a control group with a memory limit in bytes, and yields its file cgroup.procs.

    The limit includes files that the group's processes read into the cache.
    """
    file = limit_file()
    if file is None:
        raise MespError("This machine lets nobody make a control group.")
    file.parent.mkdir()
    try:
        file.write_text(str(limit))
        yield file.parent / "cgroup.procs"
    finally:
        file.parent.rmdir()
