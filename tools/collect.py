"""Collects runs with their logs and adapters from a phone or a folder, and prints a table of them.

Also copies self-check reports from a phone, into the folder self-check.

    python tools/collect.py --from runs --out collected
    python tools/collect.py [--device ID] --out collected

A phone is read with Apple's `xcrun devicectl` (Xcode 15 or later, iOS 17 or later), or without
Xcode with `pymobiledevice3`.
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mesp.commands.command import Command
from mesp.errors import FULL_DISK, MespError, plain_os_errors
from mesp.files import create, open_regular
from mesp.folders import check_disk, replacing
from mesp.formatting import printable
from mesp.runs.log import LINE, LOG_NAME, SIZE, RunLog, find_runs
from mesp.runs.report_columns import table_row
from phone import APP, Phone, connect, copying

RUNS_ON_PHONE = "Documents/runs"
SELF_CHECKS_ON_PHONE = "Documents/self-check"
KEPT = (LOG_NAME, "settings.json", "samples.json", "adapters", "best")


@click.command(cls=Command)
@click.option("--device", help="Which phone: name, UDID or identifier.  [default: the only one]")
@click.option("--from", "source", type=click.Path(path_type=Path), help="A folder to search.")
@click.option(
    "--out", type=click.Path(path_type=Path), default="collected", show_default=True,
    help="Folder for the runs.",
)  # fmt: skip
@click.option("--app", default=APP, show_default=True, help="Bundle identifier of the app.")
def main(device: str | None, source: Path | None, out: Path, app: str) -> None:
    """Collect training runs from a phone, or from a folder, and list them."""
    if source is not None:
        if device is not None:
            raise MespError("Give either --device or --from, not both.")
        if not source.is_dir():
            raise MespError(f"There is no folder {source}.")
        if out.resolve() in (source.resolve(), *source.resolve().parents):
            raise MespError(f"--out {out} holds what is to be collected: choose another folder.")
        collected = collect(source, out)
    else:
        with tempfile.TemporaryDirectory(prefix="mesp-collect-") as folder:
            phone = connect(device, app, otherwise=", or collect from a folder with --from")
            with copying(f"runs from {phone.name}"):
                phone.pull(RUNS_ON_PHONE, Path(folder))
            collected = collect(Path(folder), out)
            for report in pull_self_checks(phone, out / "self-check"):
                note(f"{report} is the report of a self-check.")
    if not collected:
        click.echo("There are no runs yet.")
        return
    print_table(collected)


def print_table(folders: list[Path]) -> None:
    table = Table("run", *table_row(RunLog()), box=None, header_style="bold", pad_edge=False)
    for folder in folders:
        try:
            log = RunLog.load(folder)
        except MespError as error:
            note(error.message)
            continue
        # A run's names and values may contain rich's markup or control characters. Text and
        # printable make them harmless.
        cells = (folder.name, *table_row(log).values())
        table.add_row(*(Text(" ".join(printable(cell).split())) for cell in cells))
    console = Console(highlight=False)
    # When the output is not a terminal, 200 columns keep names and numbers from being cut off.
    console.width = console.width if console.is_terminal else 200
    console.print(table)


def note(text: str) -> None:
    click.echo(printable(text), err=True)


def pull_self_checks(phone: Phone, out: Path) -> list[Path]:
    with tempfile.TemporaryDirectory(prefix="mesp-self-checks-") as folder:
        phone.pull(SELF_CHECKS_ON_PHONE, Path(folder))
        reports = []
        for report in sorted(Path(folder).rglob("*.json")):
            with plain_os_errors(f"Cannot copy {report.name} to {out}"):
                out.mkdir(parents=True, exist_ok=True)
                if copy(report, out / report.name):
                    reports.append(out / report.name)
    return reports


def collect(source: Path, out: Path) -> list[Path]:
    """Copies each run below `source` into a folder in `out`, and returns these folders.

    A run that was collected before is updated, unless its copy has a longer log. A different run
    with the same name gets a number after its name. A run that cannot be copied is left out with a
    note.
    """
    collected = []
    for run in find_runs(source):
        if out.resolve() in run.resolve().parents:
            continue  # `out` may lie in `source`, so these runs were collected before
        with plain_os_errors(f"Cannot copy {run} to {out}"):
            out.mkdir(parents=True, exist_ok=True)
            try:
                collected.append(collect_run(run, out))
            except (MespError, OSError) as error:
                if getattr(error, "errno", None) in FULL_DISK:
                    raise
                said = getattr(error, "strerror", None) or error
                note(f"{run} was left out: {said}".rstrip(".") + ".")
    return collected


def collect_run(run: Path, out: Path) -> Path:
    if not is_regular(run / LOG_NAME):
        raise MespError(f"{run / LOG_NAME} is not a regular file")
    if (run / LOG_NAME).stat().st_size > SIZE:
        raise MespError(f"its log has more than {SIZE >> 20} MiB")
    target = next(place for place in places(out, run.name) if may_hold(place, run))
    log = target / LOG_NAME
    if log.exists() and log.stat().st_size > (run / LOG_NAME).stat().st_size:
        note(f"{target} is further on than {run}, and was left as it is.")
        return target
    with replacing(target, f"collect.py is writing {target}") as fresh:
        for name in KEPT:
            copy(run / name, fresh / name)
    return target


def places(out: Path, name: str) -> Iterator[Path]:
    """Yields folders for a run, by its name. Names that begin with a dot are those of unfinished
    folders, and a name needs space for additions.
    """
    name = name.lstrip(".").encode(errors="ignore")[:200].decode(errors="ignore") or "run"
    yield out / name
    for number in count(2):
        yield out / f"{name}-{number}"


def may_hold(place: Path, run: Path) -> bool:
    if not place.exists():
        return True
    return (place / LOG_NAME).is_file() and first_line(place) == first_line(run)


def first_line(run: Path) -> bytes:
    with open(run / LOG_NAME, "rb") as log:
        return log.readline(LINE)


def copy(source: Path, target: Path, levels: int = 8) -> bool:
    """Leaves out everything else with a note, because a link may lead to private files."""
    if is_regular(source):
        with open_regular(source) as old, create(target) as new:
            check_disk(target.parent, source.stat().st_size)
            shutil.copyfileobj(old, new)
    elif source.is_dir() and not source.is_symlink() and levels:
        target.mkdir()
        for each in sorted(source.iterdir()):
            copy(each, target / each.name, levels - 1)
    else:
        if os.path.lexists(source):
            what = "a regular file" if levels else "a folder of a run"
            note(f"{source} is not {what}, and was left out.")
        return False
    return True


def is_regular(path: Path) -> bool:
    return os.path.lexists(path) and stat.S_ISREG(os.lstat(path).st_mode)


if __name__ == "__main__":
    main()
