import io
from pathlib import Path
from typing import TYPE_CHECKING

from mesp.errors import MespError, plain_os_errors
from studies.benchmarks.cells import Row
from studies.benchmarks.columns import COLUMNS, in_unit
from studies.benchmarks.show import drawn
from studies.benchmarks.tables import Kind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# the y axis is logarithmic if its largest value is more than this many times its smallest
LOG_FROM = 10


def check_plot(path: Path) -> None:
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise MespError(f"{path} must end in .png, .svg or .pdf.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MespError("Drawing needs matplotlib: `pip install 'mesp[report]'`.") from error


def draw(path: Path, rows: list[Row], kind: Kind) -> None:
    """Draws a panel for each heading in `kind.ys`, with a line for each combination of model,
    variant, number of blocks, sequence length and rank.
    """
    from matplotlib.figure import Figure

    lengths, ranks = ({row[name] for row in rows} for name in ("seq_len", "rank"))
    x = kind.x or ("rank" if len(ranks) > len(lengths) == 1 else "seq_len")
    points = drawn(rows)
    for row in rows:
        if row.get("paper_bytes"):
            paper = {"variant": "paper's MeSP, iPhone", "footprint_peak_bytes": row["paper_bytes"]}
            points.append(row | paper | {"seconds": None})
    names = ("model", "variant", "blocks", "seq_len", "rank")
    names = [n for n in names if n != x and len({row.get(n) for row in points}) > 1]
    figure = Figure(figsize=(9, 4 * len(kind.ys)), layout="constrained")
    panels = figure.subplots(len(kind.ys), squeeze=False).flat
    for axes, heading in zip(panels, kind.ys, strict=True):
        key, lines = COLUMNS[heading][0], {}
        for row in points:
            if row[key] is not None:
                label = ", ".join(
                    f"{row[n]} {n}" if isinstance(row[n], int) else row[n] for n in names
                )
                lines.setdefault(label, set()).add((row[x], in_unit(heading, row[key])))
        for number, (label, line) in enumerate(lines.items()):
            dashes = "o--" if number % 2 else "o-"  # keeps coinciding lines visible
            axes.plot(*zip(*sorted(line), strict=True), dashes, label=label or heading)
        heights = [height for line in lines.values() for _, height in line] or [1]
        if 0 < LOG_FROM * min(heights) < max(heights):
            axes.set_yscale("log")
        axes.set(xlabel=x.replace("seq_len", "tokens"), ylabel=heading)
        if kind.x is None:
            axes.set_xticks(sorted({row[x] for row in points}))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    write(figure, path, dpi=150)


def write(figure: "Figure", path: Path, dpi: int) -> None:
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix[1:], dpi=dpi)
    with plain_os_errors(f"Cannot write {path}"):
        path.write_bytes(image.getvalue())
