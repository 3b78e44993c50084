"""Checks the properties of a machine that training depends on, and writes a report.

    python tools/check_gpu.py --bundle demo.mesp --out checked
    python tools/check_gpu.py --phone [--device ID] --out checked
    python tools/check_gpu.py --report collected/self-check/demo.json --out checked

The first command checks this machine. The second checks a phone, which must be unlocked and
connected by a cable. The third makes an HTML page from a report. `--out` gets self-check.json and
self-check.html. With --neural-accelerator, some checks run again with TF32.
"""

import html
import json
import sys
import tempfile
import time
from math import inf
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from collect import pull_self_checks
from mesp.commands.command import Command
from mesp.engine.process import stream_records
from mesp.errors import MespError, plain_os_errors
from mesp.formatting import duration, printable
from mesp.runs.report import render_document
from phone import APP, Phone, connect

COLORS = {"pass": "green", "fail": "red", "note": "cyan", "skipped": "dim"}
POLL = 5
SILENCE = 900  # seconds without a new check after which `check_phone` stops waiting
# MLX reads this variable once in a process. 0 turns off TF32 on the neural accelerators of A19 and
# M5.
TF32 = "MLX_ENABLE_TF32"
Report = dict[str, Any]
Check = dict[str, Any]


@click.command(cls=Command)
@click.option("--bundle", help="The bundle to check with: a folder, or a name on the phone.")
@click.option("--phone", "on_phone", is_flag=True, help="Start the app on a phone to check it.")
@click.option("--device", help="Which phone: name, UDID or identifier.  [default: the only one]")
@click.option("--app", default=APP, show_default=True, help="Bundle identifier of the app.")
@click.option("--report", "existing", type=click.Path(path_type=Path), help="A report to show.")
@click.option(
    "--repeats", type=click.IntRange(1, 1000), default=50, show_default=True,
    help="Times that a gradient is computed again.",
)  # fmt: skip
@click.option(
    "--seconds", type=click.FloatRange(0, 60, min_open=True), default=1.0,
    help="Duration of one measurement.",
)  # fmt: skip
@click.option(
    "--minutes",
    type=click.FloatRange(0, 600),
    default=0.0,
    help="Duration of the training at the end.",
)
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]),
    help="The type of activations.  [default: bfloat16 on a GPU]",
)  # fmt: skip
@click.option("--neural-accelerator", is_flag=True, help="Measure training with TF32 as well.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder to write.")
def main(
    bundle: str | None, on_phone: bool, device: str | None, app: str, existing: Path | None,
    repeats: int, seconds: float, minutes: float, dtype: str | None, neural_accelerator: bool,
    out: Path,
) -> None:  # fmt: skip
    """Check properties that training depends on: mapped weights, costs, gradients, peaks."""
    if (existing is not None) + (bundle is not None or on_phone) != 1:
        raise MespError("Give a --bundle, --phone or a --report.")
    if neural_accelerator and (on_phone or existing is not None):
        raise MespError(
            "--neural-accelerator starts mesp-engine on this machine: give it with --bundle."
        )
    console = Console(stderr=True, highlight=False)
    if existing is not None:
        report = read_report(existing)
    elif on_phone:
        report = check_phone(connect(device, app, otherwise=""), bundle, console)
    else:
        settings = {"repeats": repeats, "seconds": seconds, "minutes": minutes, "dtype": dtype}
        settings["bundle"] = str(Path(bundle).resolve())
        report = check_here(settings, console, {TF32: "0"} if neural_accelerator else {})
        if neural_accelerator and report.get("end"):
            line = tf32_line(report, settings, console)
            show(line, console)
            report["start"]["names"].append(line["name"])
            report["checks"].append(line)
            if line["verdict"] == "fail":
                report["end"]["verdict"] = "fail"
    report = ended(report)
    with plain_os_errors(f"Cannot write {out}"):
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report, indent=1, ensure_ascii=False)
        (out / "self-check.json").write_text(text + "\n", encoding="utf-8")
        (out / "self-check.html").write_text(page(report), encoding="utf-8")
    click.echo(out / "self-check.html")
    sys.exit(1 if report["end"]["verdict"] == "fail" else 0)


def check_here(settings: dict[str, Any], console: Console, environment: dict[str, str]) -> Report:
    report: Report = {}
    try:
        with console.status("Checking the bundle") as status:
            for record in stream_records("self-check", settings, environment):
                kind = record.pop("type")
                if kind == "check":
                    report["checks"].append(record)
                    show(record, console)
                else:
                    report |= {kind: record} | ({"checks": []} if kind == "start" else {})
                for name in to_come(report)[:1]:
                    status.update(name)
    except MespError as error:
        if "start" not in report:
            raise
        report["problem"] = error.message
    return report


def tf32_line(report: Report, settings: dict[str, Any], console: Console) -> Check:
    without = {check["name"]: check for check in report["checks"]}
    times = [name for name in without if name.startswith("time.")]
    settings = {**settings, "checks": ["tf32", "gradients.cpu", *times]}
    line = {"name": "neural_accelerator", "measured": [], "seconds": 0}
    try:
        with console.status("Checking with TF32"):
            again = {
                record["name"]: record
                for record in stream_records("self-check", settings, {TF32: "1"})
                if record["type"] == "check"
            }
    except MespError as error:
        return line | {"verdict": "fail", "sentence": error.message}
    line["seconds"] = sum(check["seconds"] for check in again.values())
    if not numbers(again["tf32"]).get("in force"):
        sentence = "MLX does not use TF32 on this device: it has no neural accelerator for it."
        return line | {"verdict": "skipped", "sentence": sentence}
    errors = [{**each, "name": f"with TF32: {each['name']}"} for each in
              again["gradients.cpu"]["measured"]]  # fmt: skip
    relative = {
        name: step_seconds(again[name]) / step_seconds(without[name])
        for name in times
        if again[name]["measured"] and without[name]["measured"]
    }
    ratios = [
        {"name": f"{name} with TF32, relative", "value": ratio, "unit": ""}
        for name, ratio in relative.items()
    ]
    if relative:
        steps = "steps" if len(relative) > 1 else "a step"
        measured = " and ".join(f"{ratio:.2f}" for ratio in relative.values())
        time = f"With TF32, {steps} took {measured} of the time without it."
    else:
        time = "The time of a step was not measured."
    # A report has None for a number that is not finite.
    worst = max((each["value"] for each in errors), key=lambda e: inf if e is None else e)
    sentence = f"{time} The largest error of a gradient with TF32 is {amount(worst, '')}."
    return line | {"verdict": "note", "sentence": sentence, "measured": ratios + errors}


def numbers(check: Check) -> dict[str, float | None]:
    return {each["name"]: each["value"] for each in check["measured"]}


def step_seconds(check: Check) -> float:
    return sum(numbers(check)[f"default: {phase}"] for phase in ("forward", "head", "backward"))


def check_phone(phone: Phone, bundle: str | None, console: Console) -> Report:
    known = reports(phone).keys()
    phone.launch("--self-check", *([bundle] if bundle else []))
    seen, heard = 0, time.monotonic()
    with console.status(f"Checking {escape(printable(phone.name))}: leave the app in front"):
        while time.monotonic() - heard < SILENCE:
            new = reports(phone)
            for report in (new[name] for name in new.keys() - known):
                for check in report["checks"][seen:]:
                    show(check, console)
                    seen, heard = seen + 1, time.monotonic()
                if report.get("end"):
                    return report
            time.sleep(POLL)
    raise MespError(
        f"The self-check on {phone.name} has said nothing for {duration(SILENCE)}: "
        "look at the app's tab Models."
    )


def reports(phone: Phone) -> dict[str, Report]:
    with tempfile.TemporaryDirectory(prefix="mesp-self-checks-") as folder:
        return {path.name: read_report(path) for path in pull_self_checks(phone, Path(folder))}


def read_report(path: Path) -> Report:
    with plain_os_errors(f"Cannot read {path}"):
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        report = json.loads(text)
        [report["start"][key] for key in ("names", "host", "bundle", "device")]
        [check[key] for check in report["checks"] for key in ("name", "verdict", "sentence")]
    except (ValueError, TypeError, KeyError) as error:
        raise MespError(f"{path} is not a report of a self-check.") from error
    return report


def to_come(report: Report) -> list[str]:
    return report["start"]["names"][len(report["checks"]) :]


def ended(report: Report) -> Report:
    """Returns the report.

    If the process ended early, adds the missing checks. The first of them counts as failed, and the
    others as skipped.
    """
    if report.get("end"):
        return report
    problem = report.get("problem") or "The process ended in this check."
    left = {"verdict": "skipped", "sentence": "It was not reached."}
    missing = [{"name": name, **left, "measured": [], "seconds": 0} for name in to_come(report)]
    for first in missing[:1]:
        first |= {"verdict": "fail", "sentence": problem}
    end = {"verdict": "fail", "constants": {}, "seconds": 0}
    return {"start": report["start"], "checks": [*report["checks"], *missing], "end": end}


def show(check: dict[str, Any], console: Console) -> None:
    color = COLORS.get(check["verdict"], "default")
    line = f"[{color}]{check['verdict']:<7}[/] {check['name']:<20} {escape(check['sentence'])}"
    console.print(line, soft_wrap=True)


def amount(value: float | None, unit: str) -> str:
    if value is None:
        return "not finite"
    if unit == "s":
        return f"{value:.3f} s" if value >= 0.1 else f"{value * 1e6:,.1f} µs"
    if unit == "bytes":
        is_small = 0 < abs(value) < 1e5
        return f"{value / 1e3:,.1f} kB" if is_small else f"{value / 1e6:,.1f} MB"
    if unit in ("bytes/s", "FLOP/s"):
        return f"{value / 1e9:,.1f} G{unit.replace('bytes', 'B')}"
    return f"{value:,.0f}" if value == int(value) else f"{value:.2g}"


UNITS = {"metal_bytes": "bytes", "bytes_per_second": "bytes/s", "flops_per_second": "FLOP/s"}


def page(report: Report) -> str:
    start, verdict = report["start"], report["end"]["verdict"]
    counts = [
        f"{sum(check['verdict'] == each for check in report['checks'])} {name}"
        for each, name in (
            ("pass", "passed"), ("fail", "failed"), ("note", "measured"), ("skipped", "skipped"))
    ]  # fmt: skip
    about = [
        ("system", start["host"]),
        ("GPU", " ".join(filter(None, (start.get("gpu"), start.get("gpu_architecture")))) or "-"),
        ("neural accelerators", start.get("neural_accelerators", "-")),
        ("bundle", f"{start['bundle']}, {start.get('dtype', '')} on the {start['device']}"),
        ("MLX", start.get("mlx_version", "-")),
        ("checks", ", ".join(counts)),
    ]
    details = [
        f"<h2>{html.escape(check['name'])}</h2>"
        + table([(each["name"], amount(each.get("value"), each["unit"]))
                 for each in check["measured"]])
        for check in report["checks"]
        if check.get("measured")
    ]  # fmt: skip
    constants = [
        (name.replace("_", " "), amount(value, UNITS.get(name, "s")))
        for name, value in sorted(report["end"]["constants"].items())
    ]
    return render_document(
        f"Self-check: {'something failed' if verdict == 'fail' else 'nothing failed'}",
        table(about),
        "<h2>Checks</h2>",
        table([(each["name"], each["verdict"], each["sentence"]) for each in report["checks"]]),
        "<h2>Constants for the planner</h2>" + table(constants) if constants else "",
        *details,
    )


def table(rows: list[tuple[str, ...]]) -> str:
    """Cells that are a verdict are shown in its colour."""
    lines = []
    for name, *cells in rows:
        kinds = (f' class="{each}"' if each in COLORS else "" for each in cells)
        written = (f"<td{k}>{html.escape(c)}</td>" for k, c in zip(kinds, cells, strict=True))
        lines.append(f"<tr><th>{html.escape(name)}</th>{''.join(written)}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


if __name__ == "__main__":
    main()
