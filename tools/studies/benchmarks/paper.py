import json
from pathlib import Path
from typing import Any

from mesp.models.short_names import KNOWN
from studies.benchmarks.cells import Cell

_FILE = Path(__file__).resolve().parents[3] / "ios" / "MeSPTrainer" / "AppModel" / "paper.json"
TABLE: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
RANK: int = TABLE["rank"]
TIME_OF_MEBP: float = TABLE["time_of_mebp"]
RANK_32_OF_RANK_4: float = TABLE["rank_32_of_rank_4"]  # ratio of MeSP's peaks
# Peak memory of MeSP in MB, by model and sequence length.
PEAK_MB: dict[str, dict[int, float]] = {
    model: {int(length): mb for length, mb in peaks.items()}
    for model, peaks in TABLE["peak_mb"].items()
}
# The paper has no peak at 4096 tokens: there, the goal is the paper's peak at 1024 tokens. At other
# lengths, the goal is half of the paper's peak.
_GOAL_LENGTH, _LONGEST = 4096, 1024


def peak_and_goal(cell: Cell) -> tuple[float | None, float | None]:
    """Returns the paper's peak memory of MeSP and the goal for this implementation, in bytes.

    The peak is None if the paper has none for the cell.
    """
    name = cell.model.removesuffix("-Instruct")
    peaks = {t: mb * 1e6 for t, mb in PEAK_MB.get(name, {}).items()}
    if not peaks:
        return None, None
    *_, config = KNOWN[name]
    if (cell.blocks, cell.rank) != (config["num_hidden_layers"], RANK):
        return None, None
    peak = peaks.get(cell.seq_len)
    return peak, peaks[_LONGEST] if cell.seq_len == _GOAL_LENGTH else peak and peak / 2
