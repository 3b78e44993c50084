"""Takes the measurements of docs/first-hour.md, and packs them into one file to send back.

    python tools/first_hour.py                   # this machine, with the demo model
    python tools/first_hour.py --phone           # the app on a phone, over a cable

On this machine, exports the demo model for the CPU and, if there is one, the GPU. Checks the
machine, trains the bundles and compares their losses. On a phone, runs the app's self-check and
fetches the logs of its runs. If a step fails, the file is still written, and the exit status is 1.
"""

import json
import platform
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import click

from mesp.commands.command import Command
from mesp.errors import MespError, plain_os_errors
from mesp.runs.log import LOG_NAME, RunLog, find_runs
from phone import APP

TOOLS = Path(__file__).resolve().parent
OUT = TOOLS.parent / "build" / "first-hour"
STEPS = 20
# Losses on a GPU in bfloat16 and on a CPU in float32 should agree to about two digits.
TOLERANCE = 0.05


class Steps:
    def __init__(self, log: Path) -> None:
        self.log = log
        self.failed: list[str] = []

    def say(self, text: str) -> None:
        click.echo(text)
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(text + "\n")

    def program(self, name: str, *arguments: object) -> bool:
        return self.run(Path(sys.executable).with_name(name), *arguments)

    def tool(self, name: str, *arguments: object) -> None:
        self.run(sys.executable, TOOLS / name, *arguments)

    def run(self, *command: object) -> bool:
        line = [str(part) for part in command]
        shown = shlex.join(Path(part).name if Path(part).is_absolute() else part for part in line)
        self.say(f"\n$ {shown}")
        with subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            for printed in process.stdout or ():
                self.say(printed.rstrip("\n"))
        if process.returncode != 0:
            self.failed.append(f"{shown} (exit code {process.returncode})")
        return process.returncode == 0


@click.command(cls=Command)
@click.option("--phone", "on_phone", is_flag=True, help="Measure the app on a phone.")
@click.option("--device", help="Which phone: name, UDID or identifier.  [default: the only one]")
@click.option("--app", default=APP, show_default=True, help="Bundle identifier of the app.")
@click.option(
    "--seconds", type=click.FloatRange(0, 60, min_open=True), default=1.0,
    help="Duration of one measurement.",
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), default=OUT, help="Replaced if there.")
def main(on_phone: bool, device: str | None, app: str, seconds: float, out: Path) -> None:
    """Measure this machine or a phone, and pack one file to send back."""
    if device is not None and not on_phone:
        raise MespError("--device names a phone: give it with --phone.")
    out = out.resolve()
    with plain_os_errors(f"Cannot write {out}"):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        steps = Steps(out / "log.txt")
        if on_phone:
            phone = ["--app", app, *(["--device", device] if device else [])]
            steps.tool("check_gpu.py", "--phone", *phone, "--out", out / "self-check")
            steps.tool("collect.py", *phone, "--out", out / "runs")
        else:
            measure_here(steps, out, seconds)
        packed = pack(out, steps.failed)
    for failed in steps.failed:
        click.echo(f"This failed: {failed}", err=True)
    click.echo(f"Send this file back: {packed}")
    sys.exit(1 if steps.failed else 0)


def measure_here(steps: Steps, out: Path, seconds: float) -> None:
    bundle = out / "demo.mesp"
    lengths = ("--seq-len", 128, "--seq-len", 256, "--rank", 8)
    if not steps.program("mesp-export", "--model", "demo", *lengths, "--out", bundle):
        return
    check = ("--bundle", bundle, "--seconds", seconds)
    steps.tool("check_gpu.py", *check, "--out", out / "self-check")
    runs = []
    for name, device in (("default", ()), ("cpu", ("--device", "cpu"))):
        run = out / "runs" / name
        options = ("--steps", STEPS, "--seq-len", 128, "--val-batches", 0, "--out", run)
        if steps.program("mesp-train", bundle, *options, *device):
            runs.append(RunLog.load(run))
    if len(runs) == 2:
        first = [run.steps[0]["loss"] for run in runs]
        last = [run.steps[-1]["loss"] for run in runs]
        steps.say(
            f"The losses of the first step are {first[0]:.4f} and, on the CPU, {first[1]:.4f}; "
            f"of the last {last[0]:.4f} and {last[1]:.4f}."
        )
        if any(abs(a - b) > TOLERANCE for a, b in (first, last)):
            steps.failed.append("the losses differ from the CPU's")


def pack(out: Path, failed: list[str]) -> Path:
    machine = {
        "system": platform.platform(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "failed": failed,
    }
    texts = {"machine.json": json.dumps(machine, indent=1)}
    files = [out / "log.txt", *sorted(out.glob("self-check/self-check.*"))]
    # collect.py also copies older reports from the phone.
    files += sorted(out.glob("runs/self-check/*.json"))
    files += [run / LOG_NAME for run in find_runs(out / "runs")] if (out / "runs").is_dir() else []
    for file in files:
        if file.is_file():
            name = file.relative_to(out).as_posix()
            texts[name] = file.read_text(encoding="utf-8", errors="replace")
    packed = out / "first-hour.zip"
    home = str(Path.home())
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(f"first-hour/{name}", text.replace(home, "~"))
    return packed


if __name__ == "__main__":
    main()
