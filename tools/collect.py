"""Collects runs, logs and adapters, from a phone or a folder, and prints a table of them.

    python tools/collect.py --from runs --out collected
    python tools/collect.py [--device ID] --out collected

A phone is read with Apple's `xcrun devicectl` (Xcode 15 or later, iOS 17 or later).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from mesp.bundle import replacing
from mesp.errors import MespError, plain_os_errors
from mesp.log import COLUMNS, LOG_NAME, find_runs, read_run, table_row

APP = "org.mesp.MeSPTrainer"
RUNS_ON_PHONE = "Documents/runs"
KEPT = (LOG_NAME, "settings.json", "samples.json", "adapters", "best")  # of a run's folder
TIMEOUT = 600  # seconds that devicectl may take for one command


@click.command()
@click.option("--device", help="Which phone: name, UDID or identifier.  [default: the only one]")
@click.option("--from", "source", type=click.Path(path_type=Path), help="A folder to search.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Where runs go.")
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
            pull(device or only_device(), app, Path(folder))
            collected = collect(Path(folder), out)
    if not collected:
        click.echo("There are no runs yet.")
        return
    print_table(collected)


def print_table(folders: list[Path]) -> None:
    table = Table("run", *COLUMNS, box=None, header_style="bold", pad_edge=False)
    for folder in folders:
        table.add_row(folder.name, *table_row(read_run(folder)))
    console = Console(highlight=False)
    # Without a terminal there is no width to keep to, and cut-off figures help nobody.
    console.width = console.width if console.is_terminal else 200
    console.print(table)


# Copying


def collect(source: Path, out: Path) -> list[Path]:
    """Copies every run below `source` into a folder of its own in `out`; returns those folders.

    A run that was collected before is refreshed. One that only has the name of another run in
    common gets a number behind it.
    """
    collected = []
    for run in find_runs(source):
        if out.resolve() in run.resolve().parents:
            continue  # `out` lies in `source`: this is what was collected before
        target = next(place for place in places(out, run.name) if may_hold(place, run))
        if is_newer(target, run):
            click.echo(f"{target} is further on than {run}, and was left as it is.", err=True)
        else:
            with plain_os_errors(f"Cannot copy {run} to {target}"):
                replace(run, target)
        collected.append(target)
    return collected


def places(out: Path, name: str) -> Iterator[Path]:
    yield out / name
    number = 2
    while True:
        yield out / f"{name}-{number}"
        number += 1


def may_hold(place: Path, run: Path) -> bool:
    """Whether `place` is free or holds the same run, known by the first record of its log."""
    if not place.exists():
        return True
    return (place / LOG_NAME).is_file() and first_line(place) == first_line(run)


def first_line(run: Path) -> bytes:
    with open(run / LOG_NAME, "rb") as log:
        return log.readline()


def is_newer(collected: Path, run: Path) -> bool:
    log = collected / LOG_NAME
    return log.exists() and log.stat().st_size > (run / LOG_NAME).stat().st_size


def replace(run: Path, target: Path) -> None:
    """Puts a copy of the run in the target's place. Whoever looks sees the old one or the new."""
    with replacing(target, f"collect.py is writing {target}") as fresh:
        for name in KEPT:
            if (run / name).is_dir():
                shutil.copytree(run / name, fresh / name)
            elif (run / name).exists():
                shutil.copy2(run / name, fresh / name)


# The phone


def only_device() -> str:
    """The identifier of the one phone or tablet that can be reached."""
    devices = devicectl("list", "devices")["devices"]
    reachable = []
    for device in devices:
        hardware, connection = device["hardwareProperties"], device["connectionProperties"]
        if (
            hardware.get("platform") in ("iOS", "iPadOS")
            and hardware.get("reality", "physical") == "physical"
            and connection.get("pairingState") == "paired"
            and connection.get("tunnelState") != "unavailable"
        ):
            reachable.append((device["deviceProperties"]["name"], device["identifier"]))
    if not reachable:
        raise MespError(
            "No phone can be reached: connect it with a cable, unlock it, tap Trust and turn on "
            "Developer Mode, or collect from a folder with --from."
        )
    if len(reachable) > 1:
        listed = ", ".join(f"{name} ({identifier})" for name, identifier in reachable)
        raise MespError(f"Several phones can be reached, choose one with --device: {listed}.")
    return reachable[0][1]


def pull(device: str, app: str, destination: Path) -> None:
    """Copies the app's runs into the folder `destination`, whole; nothing where there are none."""
    try:
        devicectl(
            *("device", "copy", "from", "--device", device),
            *("--domain-type", "appDataContainer", "--domain-identifier", app),
            *("--source", RUNS_ON_PHONE, "--destination", str(destination)),
        )
    except DeviceError as error:
        if not error.means("Failed to retrieve the file node"):
            raise MespError(explain(error, device, app)) from error


class DeviceError(MespError):
    """A failure as devicectl reports it: text, and an error within an error within an error."""

    def __init__(self, text: str, error: dict):
        super().__init__(text)
        self.everything = text + json.dumps(error)

    def means(self, *signs: str) -> bool:
        return any(sign in self.everything for sign in signs)


def explain(error: DeviceError, device: str, app: str) -> str:
    if error.means("DeviceLocked", "0xE80000E2", "device is locked", "could not be, unlocked"):
        return f"The phone {device} is locked: unlock it and try again."
    if error.means("ContainerLookupErrorDomain"):
        return (
            f"The app {app} is not on the phone {device}, or was not installed from Xcode: "
            "build it onto the phone, or name another one with --app."
        )
    if error.means("The specified device was not found"):
        return f"There is no phone {device}: `xcrun devicectl list devices` shows which there are."
    return f"The phone {device} cannot be read: {error.message}"


def devicectl(*arguments: str) -> dict:
    """Runs `xcrun devicectl` and returns its result. It writes JSON for programs to a file."""
    if shutil.which("xcrun") is None:
        raise MespError(
            "A phone is read with xcrun, which comes with Xcode on a Mac: "
            "run this there, or collect from a folder with --from."
        )
    with tempfile.TemporaryDirectory(prefix="mesp-devicectl-") as folder:
        path = Path(folder, "result.json")
        done = subprocess.run(
            ["xcrun", "devicectl", *arguments, "--timeout", str(TIMEOUT), "--json-output", path],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        try:
            answer = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            answer = {}
    if done.returncode == 0 and "result" in answer:
        return answer["result"]
    if "unable to find utility" in done.stderr:
        raise MespError(
            "xcrun finds no devicectl: install Xcode 15 or later and choose it with "
            "`sudo xcode-select -s /Applications/Xcode.app`."
        )
    said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    text = said[0].removeprefix("ERROR: ") if said else done.stderr.strip() or "devicectl failed."
    raise DeviceError(text, answer.get("error", {}))


if __name__ == "__main__":
    main()
