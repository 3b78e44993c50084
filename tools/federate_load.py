"""What a federation of many takes beside its clients' training, on this machine.

    python tools/federate_load.py

Simulates 200 clients of the demo model, of whom 10 train in each of 50 rounds, as many at once as
there are cores. Needs Flower, and Linux: what processes take is read in /proc.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from benchmarks.show import show
from demo import OUT as DEMO_OUT
from demo import RANK, SEQ_LEN, call, program
from mesp.commands.command import Command
from mesp.engine.build import find_engine
from mesp.errors import MespError
from mesp.federate.federation import Federation
from mesp.formatting import decimal, megabytes
from tasks.house import cases

OUT = DEMO_OUT.with_name("federate-load")
HELD_OUT_CASES = 25
LINES = 10  # of the table of rounds
START = 5  # rounds in which memory is taken that stays
LOOK = 0.2  # seconds between two looks at the processes
# In the engine's place: leaves the processor's time and the last record of a run in a file.
ENGINE = """\
#!/bin/sh
"{engine}" "$@" || exit
case $1 in
*.json) {{ times; tail -n 1 "${{1%/*}}/metrics.jsonl"; }} >>"{runs}/$$" ;;
esac
"""
TIMES = r"\S+ \S+\n(\d+)m([\d.]+)s \S+\n(\{.*\})\n"  # the shell's, the engine's, a record


class Load(NamedTuple):
    """What a federation took by the clock, in processor seconds of the user, without engines, by
    process, and of the server's memory at the end of each round, in bytes."""

    seconds: float
    user_seconds: dict[int, float]
    server_bytes: dict[int, int]


class Run(NamedTuple):
    """What a run of the engine took, by the clock and in processor seconds of the user."""

    steps: int
    seconds: float
    user_seconds: float


@click.command(cls=Command)
@click.option("--clients", type=click.IntRange(min=1), default=200)
@click.option("--sampled", type=click.IntRange(min=1), default=10, help="Clients in a round.")
@click.option("--steps", type=click.IntRange(min=1), default=20, help="Of a client in a round.")
@click.option("--rounds", type=click.IntRange(min=START + 2), default=50)
@click.option("--out", type=click.Path(path_type=Path), default=OUT, help="Replaced.")
def main(clients: int, sampled: int, steps: int, rounds: int, out: Path) -> None:
    """Simulate many clients, and say what their federation takes beside their training."""
    if not Path("/proc/self/stat").exists():
        raise MespError("What processes take is read in /proc, as Linux has it.")
    shutil.rmtree(out, ignore_errors=True)
    bundle, data, output, runs = (out / name for name in ("demo.mesp", "requests", "run", "runs"))
    write_data(data, clients * steps)
    call(
        *(program("mesp-export"), "--model", "demo", "--out", bundle),
        *("--seq-len", SEQ_LEN, "--rank", RANK),
    )
    line = (
        *(program("mesp"), "federate", bundle, "--data", data, "--out", output, "--steps", steps),
        *("--clients", clients, "--strategy-options", f"fraction_train={sampled / clients}"),
        *("--rounds", rounds, "--val-batches", HELD_OUT_CASES),
    )
    load = watched([*map(str, line)], {"MESP_ENGINE": str(recording_engine(runs))}, output)
    records = Federation.read(output).rounds.records()
    show(lines(records[1:], load))
    click.echo("\n" + described(load, read_runs(runs), os.cpu_count() or 1))


def write_data(folder: Path, count: int) -> None:
    """So many training cases, and those that are held out."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, number, held_out in (("train", count, False), ("valid", HELD_OUT_CASES, True)):
        each = cases(number, seed=int(held_out), held_out=held_out)
        text = "".join(json.dumps(case._asdict()) + "\n" for case in each)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def recording_engine(runs: Path) -> Path:
    """A program that is the engine, and leaves in the folder `runs` what each run took."""
    runs.mkdir()
    program = runs.with_name("mesp-engine")
    program.write_text(ENGINE.format(engine=find_engine(), runs=runs.resolve()), encoding="utf-8")
    program.chmod(0o755)
    return program.resolve()


def read_runs(runs: Path) -> list[Run]:
    """What the runs took."""
    return [
        Run(record["step"], record["seconds"], 60 * int(minutes) + float(seconds))
        for file in runs.iterdir()
        for minutes, seconds, end in re.findall(TIMES, file.read_text(encoding="utf-8"))
        for record in [json.loads(end)]
    ]


def watched(line: list[str], environment: dict[str, str], output: Path) -> Load:
    """Runs a federation into `output` and looks at its processes. Raises MespError."""
    began, user_seconds, server_bytes = time.monotonic(), {}, {}
    with subprocess.Popen(line, env=os.environ | environment) as process:
        while process.poll() is None:
            user_seconds |= user_seconds_below(process.pid)
            for round in (output / "rounds").glob("[0-9]*"):
                if int(round.name) not in server_bytes:
                    server_bytes[int(round.name)] = resident_bytes(process.pid)
            time.sleep(LOOK)
    if process.returncode != 0:
        raise MespError("mesp federate failed.")
    return Load(time.monotonic() - began, user_seconds, server_bytes)


def user_seconds_below(root: int) -> dict[int, float]:
    """Of a process and all below it, but for engines, what each has taken itself."""
    parents, found = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, rest = file.read_text(encoding="utf-8", errors="replace").rpartition(") ")
        except OSError:  # it has ended
            continue
        pid, _, name = head.partition(" (")
        fields = rest.split()  # from the third field of proc(5) on
        parents[int(pid)] = int(fields[1])
        if name != "mesp-engine":
            found[int(pid)] = int(fields[11]) / os.sysconf("SC_CLK_TCK")

    def is_below(pid: int) -> bool:
        return pid == root or (pid in parents and is_below(parents[pid]))

    return {pid: seconds for pid, seconds in found.items() if is_below(pid)}


def resident_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def lines(records: list[dict], load: Load) -> list[dict[str, str]]:
    """A table of some rounds."""
    return [
        {
            "round": str(record["round"]),
            "clients": str(len(record["clients"])),
            "held-out loss": decimal(record["held_out_loss"], 3),
            "server's MB": megabytes(load.server_bytes[record["round"]]),
        }
        for record in records[:: max(1, len(records) // LINES)]
    ]


def described(load: Load, runs: list[Run], cores: int) -> str:
    """What was taken in sentences."""
    clients = [run for run in runs if run.steps > 0]
    training = sum(run.seconds for run in clients)
    engines = sum(run.user_seconds for run in clients)
    judging = [run for run in runs if run.steps == 0]
    others = sum(load.user_seconds.values()) + sum(run.user_seconds for run in judging)
    rounds = [number for number in load.server_bytes if number >= START]
    resident = np.array([load.server_bytes[number] for number in rounds]) / 1e6
    growth = float(np.polyfit(rounds, resident, 1)[0]) * (rounds[-1] - rounds[0])
    return "\n".join(
        [
            f"{load.seconds:.0f} s for {len(clients)} runs of {training:.0f} s in all, "
            f"{cores} at once: {load.seconds * cores / training - 1:+.0%}.",
            f"Processor time: {engines:.0f} s of training, {others:.0f} s of all else "
            f"({others / engines:+.0%}), of which {sum(r.user_seconds for r in judging):.0f} s to "
            "measure the rounds.",
            f"The server's memory: {megabytes(load.server_bytes[START])} MB after {START} rounds; "
            f"a line through the rest rises by {growth:+.1f} MB.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
