"""Draws the README's picture of peak memory from docs/measurements.json and the paper's figure.

\b
  python tools/studies/draw_memory.py
"""

import json
import sys
from pathlib import Path

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))
from mesp.commands.command import Command
from studies.benchmarks.paper import PEAK_MB
from studies.benchmarks.plot import check_plot, write

DOCS = Path(__file__).resolve().parents[2] / "docs"
# For each bar's label, the name of its figure in measurements.json. The figures ascend.
BARS = {
    "MeSP, on a CPU\nAdamW in 8 bits, the default": "peak with the default optimizer",
    "mlx-lm with gradient checkpointing, on a CPU\nSGD, extrapolated from two blocks": (
        "peak of mlx-lm as shipped with gradient checkpointing"
    ),
    "PEFT with gradient checkpointing, on a CPU\nSGD, float32 weights": (
        "peak of PEFT on PyTorch with gradient checkpointing"
    ),
}
PAPER = "the paper, as it reports, on an iPhone 17 Pro\nSGD"


def peaks() -> dict[str, float]:
    file = DOCS / "measurements.json"
    figures = {m["name"]: m["value"] for m in json.loads(file.read_text(encoding="utf-8"))}
    measured = {label: figures[name] for label, name in BARS.items()}
    shown = measured | {PAPER: PEAK_MB["Qwen2.5-0.5B"][256]}
    return dict(sorted(shown.items(), key=lambda bar: bar[1]))


@click.command(cls=Command, help=__doc__)
@click.option(
    "--out", type=click.Path(path_type=Path), default=DOCS / "images" / "memory.png",
    show_default="docs/images/memory.png", help="The picture: *.png, *.svg or *.pdf.",
)  # fmt: skip
def main(out: Path) -> None:
    check_plot(out)
    from matplotlib.figure import Figure

    bars = dict(reversed(peaks().items()))  # puts the first label at the top
    colors = ["#c8c8c8" if label == PAPER else "#9db4d0" for label in bars]
    colors[-1] = "#2a6fbb"
    figure = Figure(figsize=(8, 2.9), layout="constrained")
    axes = figure.subplots()
    drawn = axes.barh(list(bars), list(bars.values()), color=colors)
    axes.bar_label(drawn, [f"{mb:,} MB" for mb in bars.values()], padding=4)
    axes.set_xlim(0, 1.2 * max(bars.values()))
    axes.set_xlabel("peak memory of a training step, MB (without mapped weights)")
    axes.set_title("Qwen2.5-0.5B, 256 tokens, LoRA rank 8", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    write(figure, out, dpi=150)


if __name__ == "__main__":
    main()
