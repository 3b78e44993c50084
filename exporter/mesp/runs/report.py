"""Writes an HTML page about one or several runs.

The page shows a run's `samples.json`, a list of `{"prompt", "before", "after"}`, if there is one.
"""

from __future__ import annotations

import html
import io
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesp.errors import MespError, plain_os_errors
from mesp.files import read_json, write_whole
from mesp.formatting import decimal, megabytes
from mesp.runs.log import RunLog, find_runs
from mesp.runs.report_columns import table_row
from mesp.settings.declaration import list_settings
from mesp.settings.train_settings import TrainSettings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 40
SAMPLES_SIZE = 16 << 20  # maximum size of a samples.json in bytes
PHASES = ("forward", "loss", "backward")
WIDTH, HEIGHT = 5, 3.5
HOW_STARTED = ("resume", "dry_run")
LOSSES = ("loss", "held-out", "test", "best held-out")
INK = "#010203"
Row = tuple[str, list[str]]
Paint = Callable[["Axes", str, RunLog, str], None]


def write_report(folders: Iterable[Path], out: Path) -> None:
    if out.suffix != ".html":
        raise MespError(f"--out {out} must end in .html.")
    runs: dict[str, RunLog] = {}
    samples: dict[str, list[dict[str, str]]] = {}
    for folder in folders:
        if not folder.is_dir():
            raise MespError(f"There is no folder {folder}; name a run's, or one with runs in it.")
        found = find_runs(folder)
        if not found:
            raise MespError(f"There is no run in {folder}.")
        for path in found:
            # The name may contain bytes that are not valid UTF-8.
            name = unique_name(os.fsencode(path.name).decode("utf-8", "replace"), runs)
            runs[name], samples[name] = RunLog.load(path), read_samples(path / "samples.json")
    text = render_page(runs, samples)
    with plain_os_errors(f"Cannot write {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, text.encode())


def unique_name(name: str, taken: dict[str, RunLog]) -> str:
    number, free = 2, name
    while free in taken:
        free, number = f"{name} ({number})", number + 1
    return free


def read_samples(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    try:
        with plain_os_errors(f"Cannot read {path}"):
            listed = read_json(path, SAMPLES_SIZE)
        return [{key: str(each[key]) for key in ("prompt", "before", "after")} for each in listed]
    except (ValueError, TypeError, KeyError) as error:
        raise MespError(
            f"{path} is not a list of samples with prompt, before and after."
        ) from error


def smooth(
    run: RunLog, value: Callable[[dict[str, Any]], float]
) -> tuple[list[float], list[float]]:
    size = max(1, len(run.steps) // POINTS)
    groups = [run.steps[i : i + size] for i in range(0, len(run.steps), size)]
    return (
        [sum(step["step"] for step in group) / len(group) for group in groups],
        [sum(value(step) for step in group) / len(group) for group in groups],
    )


def draw_picture(title: str, runs: dict[str, RunLog], paint: Paint, **axes_properties: Any) -> str:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MespError("Drawing needs matplotlib: `pip install 'mesp[report]'`.") from error
    style: Any = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    )
    style |= {
        "svg.fonttype": "none",
        "svg.hashsalt": "mesp",
        "font.size": 9,
        "text.parse_math": False,
        "legend.frameon": False,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=INK, alpha=0.12)
        for number, (name, run) in enumerate(runs.items()):
            paint(axes, name, run, f"C{number % 10}")
        axes.set(**axes_properties)
        if axes.get_legend_handles_labels()[1]:
            figure.legend(loc="outside lower center", ncols=2, fontsize="small")
        file = io.BytesIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue().decode()
    drawing = svg[svg.index("<defs>") :].replace(INK, "currentColor").replace("xlink:", "")
    # Ids must be unique in the whole page, which has several pictures.
    drawing = re.sub(
        r'(id="|href="#|url\(#)', rf"\g<1>{paint.__qualname__.split('.')[0]}-", drawing
    )
    svg = f'<svg role="img" aria-label="{title}" viewBox="0 0 {WIDTH * 72} {HEIGHT * 72}">{drawing}'
    return f"<figure><figcaption>{title}</figcaption>{svg}</figure>"


def draw_loss(runs: dict[str, RunLog]) -> str:
    def paint(axes: Axes, name: str, run: RunLog, color: str) -> None:
        own = [step for step in run.steps if not step.get("replayed")]
        run = replace(run, steps=tuple(own or run.steps))
        if len(runs) == 1 and len(run.steps) > POINTS:
            every = max(1, len(run.steps) // 1000)
            some = run.steps[::every]
            xs, ys = [step["step"] for step in some], [step["loss"] for step in some]
            axes.plot(xs, ys, ".", color=color, alpha=0.3, markersize=2, linewidth=0)
        axes.plot(*smooth(run, lambda step: step["loss"]), color=color, label=f"{name}, training")
        for split, style in (("valid", "o"), ("test", "*")):
            evals = [(record["step"], record["loss"]) for record in run.evals_of(split)]
            if evals:
                label = f"{name}, {'held out' if split == 'valid' else 'test'}"
                axes.plot(*zip(*evals, strict=True), style, color=color, markersize=4, label=label)

    return draw_picture("Loss", runs, paint, xlabel="step", ylabel=unit_of_loss(runs) or "loss")


def unit_of_loss(runs: dict[str, RunLog]) -> str:
    others = ("objective", "group_size")
    has_others = any(run.settings.get(name) is not None for run in runs.values() for name in others)
    return "" if has_others else "nats a token"


def draw_reward(runs: dict[str, RunLog]) -> str:
    rewarded = {name: run for name, run in runs.items() if rewarded_steps(run)}
    if not rewarded:
        return ""

    def paint(axes: Axes, name: str, run: RunLog, color: str) -> None:
        run = replace(run, steps=rewarded_steps(run))
        axes.plot(*smooth(run, itemgetter("reward")), color=color, label=name)

    return draw_picture("Reward", rewarded, paint, xlabel="step", ylabel="mean of the answers")


def rewarded_steps(run: RunLog) -> tuple[dict[str, Any], ...]:
    return tuple(step for step in run.steps if "reward" in step)


def draw_memory(runs: dict[str, RunLog]) -> str:
    def paint(axes: Axes, name: str, run: RunLog, color: str) -> None:
        steps = [step["step"] for step in run.steps]
        peaks = [step["footprint_peak_bytes"] / 1e6 for step in run.steps]
        axes.plot(steps, peaks, color=color, label=name)
        if "predicted_peak_bytes" in run.plan:
            predicted = run.plan["predicted_peak_bytes"] / 1e6
            axes.axhline(predicted, color=color, linestyle=":", label=f"{name}, predicted")

    return draw_picture(
        "Peak footprint of each step", runs, paint, xlabel="step", ylabel="MB", ylim=(0, None)
    )


def draw_time(runs: dict[str, RunLog]) -> str:
    if len(runs) > 1:
        return draw_phases(runs)

    def paint(axes: Axes, _: str, run: RunLog, color: str) -> None:
        if not run.steps:
            return
        steps, seconds = smooth(run, lambda step: step["seconds"])
        if has_phases(run):
            parts = [smooth(run, itemgetter(f"{phase}_seconds"))[1] for phase in PHASES]
            axes.stackplot(steps, parts, labels=PHASES, alpha=0.8)
        axes.plot(steps, seconds, color=INK, linewidth=1, label="all")

    return draw_picture(
        "Time of a step", runs, paint, xlabel="step", ylabel="seconds", ylim=(0, None)
    )


def draw_phases(runs: dict[str, RunLog]) -> str:
    def paint(axes: Axes, name: str, run: RunLog, _: str) -> None:
        if not run.steps:
            return
        all_seconds = sum(step["seconds"] for step in run.steps) / len(run.steps)
        left, named = 0.0, axes.get_legend_handles_labels()[1]
        for number, phase in enumerate(PHASES if has_phases(run) else ()):
            mean = sum(step[f"{phase}_seconds"] for step in run.steps) / len(run.steps)
            label = None if phase in named else phase
            axes.barh(name, mean, left=left, color=f"C{number}", alpha=0.8, label=label)
            left += mean
        label = None if "the rest" in named else "the rest"
        axes.barh(name, max(0, all_seconds - left), left=left, color=INK, alpha=0.3, label=label)
        axes.yaxis.set_inverted(True)

    return draw_picture("Time of a step, mean", runs, paint, xlabel="seconds")


def has_phases(run: RunLog) -> bool:
    return all(f"{phase}_seconds" in step for step in run.steps for phase in PHASES)


def render_page(runs: dict[str, RunLog], samples: dict[str, list[dict[str, str]]]) -> str:
    pictures = [draw(runs) for draw in (draw_loss, draw_reward, draw_memory, draw_time)]
    title = " · ".join(dict.fromkeys(run.model for run in runs.values()))
    return render_document(
        title,
        render_table(runs, summary_rows(runs)),
        f'<div class="pictures">{"".join(pictures)}</div>',
        "".join(render_samples(name, each) for name, each in samples.items() if each),
        "<h2>Settings</h2>",
        render_table(runs, settings_rows(runs), "settings"),
        render_events(runs),
    )


def render_document(title: str, *parts: str) -> str:
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>MeSP: {html.escape(title)}</title>
<style>{STYLE}</style>
<h1>{html.escape(title)}</h1>
{body}
</html>
"""


STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.45 system-ui, sans-serif; max-width: 64rem; margin: 0 auto; padding: 1rem;
       background: light-dark(#fff, #16181c); color: light-dark(#1c1e21, #e4e6ea) }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem }
th, td { text-align: left; vertical-align: top; padding: .25rem .9rem .25rem 0;
         border-bottom: 1px solid light-dark(#0002, #fff2) }
th { font-weight: 600 } td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
tr > th:first-child { font-weight: 400; opacity: .7; white-space: nowrap }
.settings .differs td { font-weight: 600 }
.pictures, .sample {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem }
figure { margin: 1rem 0 0 } figcaption { font-weight: 600; margin-bottom: .3rem }
svg { width: 100%; height: auto }
.sample p { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0 }
blockquote { margin: 0; padding-left: .8rem; border-left: 3px solid light-dark(#0003, #fff4) }
small { opacity: .7 }
.fail { color: light-dark(#b3261e, #ff8a80); font-weight: 600 }
.pass { color: light-dark(#1b6e3a, #7fd99a) } .skipped { opacity: .7; overflow-wrap: normal }
"""


def render_table(runs: dict[str, RunLog], rows: list[Row], kind: str = "") -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in runs)
    lines = [f"<tr><th></th>{head}</tr>"]
    for name, values in rows:
        differs = ' class="differs"' if len(set(values)) > 1 else ""
        cells = "".join(f"<td>{html.escape(value)}</td>" for value in values)
        lines.append(f"<tr{differs}><th>{html.escape(name)}</th>{cells}</tr>")
    return f'<div class="wide"><table class="{kind}">{"".join(lines)}</table></div>'


def summary_rows(runs: dict[str, RunLog]) -> list[Row]:
    unit = unit_of_loss(runs)
    rows = as_rows(map(table_row, runs.values()))
    rows += [row for row in as_rows(map(details, runs.values())) if {*row[1]} != {"-"}]
    return [(f"{name}, {unit}" if unit and name in LOSSES else name, row) for name, row in rows]


def as_rows(columns: Iterable[dict[str, str]]) -> list[Row]:
    columns = list(columns)
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, "-") for column in columns]) for name in names]


def details(run: RunLog) -> dict[str, str]:
    best = run.best
    return {
        "test": decimal(run.test),
        "best held-out": f"{decimal(best['loss'])} at step {best['step']}" if best else "-",
        "reward": describe_reward(run),
        "sampled": describe_sampled(run),
        "kept at the end": run.describe_strength() or "-",
        "predicted MB": megabytes(run.plan.get("predicted_peak_bytes")),
        "began": run.start.get("time", "-").replace("T", " ").rstrip("Z"),
        "machine": run.start.get("host", "-"),
    }


def describe_reward(run: RunLog) -> str:
    steps = rewarded_steps(run)
    some = max(1, len(steps) // 10)
    means = (sum(step["reward"] for step in part) / some for part in (steps[:some], steps[-some:]))
    return " → ".join(decimal(mean) for mean in means) if steps else "-"


def describe_sampled(run: RunLog) -> str:
    steps = [step for step in rewarded_steps(run) if "sampled_tokens" in step]
    tokens = sum(step["sampled_tokens"] for step in steps)
    seconds = sum(step.get("sampling_seconds", 0) for step in steps)
    return f"{tokens:,} tokens in {decimal(seconds, 0)} s" if steps else "-"


def settings_rows(runs: dict[str, RunLog]) -> list[Row]:
    return as_rows(settings_that_apply(run.settings) for run in runs.values())


def settings_that_apply(settings: dict[str, Any]) -> dict[str, str]:
    declared = list_settings(TrainSettings)
    by_name = {name: settings.get(each.key) for name, each in declared.items()}
    by_name["reward"] = settings.get("group_size")  # the log has the group size, but not the reward
    useless = {each.key for each in declared.values() if not each.applies(by_name)}
    return {
        key: ", ".join(map(str, value)) if isinstance(value, list) else json.dumps(value).strip('"')
        for key, value in settings.items()
        if value not in (None, []) and key not in useless and key not in HOW_STARTED
    }


def render_events(runs: dict[str, RunLog]) -> str:
    items = []
    for name, run in runs.items():
        for event in run.events:
            what, when, message = (event.get(key, "") for key in ("event", "time", "message"))
            text = f"{name}, {when}: {what}" if len(runs) > 1 else f"{when}: {what}"
            items.append(f"<li>{html.escape(text)}<br>{html.escape(message)}</li>")
    return f"<h2>Events</h2><ul>{''.join(items)}</ul>" if items else ""


def render_samples(name: str, samples: list[dict[str, str]]) -> str:
    parts = [f"<h2>Samples of {html.escape(name)}</h2>"]
    for sample in samples:
        parts.append(f"<p><b>{html.escape(sample['prompt'])}</b></p><div class='sample'>")
        for when in ("before", "after"):
            text = html.escape(sample[when].strip())
            parts.append(f"<blockquote><small>{when}</small><p>{text}</p></blockquote>")
        parts.append("</div>")
    return "".join(parts)
