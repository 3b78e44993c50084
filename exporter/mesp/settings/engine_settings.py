from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from mesp.settings.declaration import Settings, setting
from mesp.settings.train_settings import MAX_STEPS

ORDERS = {
    "sequences": "Each through all blocks, forward and backward, before the next.",
    "blocks": "All through each block before the next block, so that its weights are read once a "
    "pass.",
}


@dataclass(frozen=True, kw_only=True)
class EngineSettings(Settings):
    bundle: str = setting(Path, MISSING, "Folder of the bundle.", may_change=True)
    output: str = setting(
        Path, MISSING, "Folder that gets `metrics.jsonl` and `adapters/`.", may_change=True
    )
    data: str | None = setting(
        Path, None, "Folder of tokens to train on.", may_change=True,
        default_text="the bundle's own text",
    )  # fmt: skip
    resume: bool = setting(
        bool, False, "Resume from the state in the output folder.", may_change=True
    )
    dry_run: bool = setting(bool, False, "Report the plan and end.", may_change=True)
    epochs: float | None = setting(
        float, None,
        "Passes over the training data, which set `steps`; with replay, over the run's own data.",
        above=0,
    )  # fmt: skip
    first_step: int = setting(
        int, 0,
        "Steps that others have taken before this run, as in the rounds of a federation: the order "
        "of the data and every random number continue from there.",
        least=0, most=MAX_STEPS,
    )  # fmt: skip
    proximal_mu: float | None = setting(
        float, None,
        "μ of FedProx (arXiv:1812.06127): μ (w − w₀) is added to the gradient, where w₀ are the "  # noqa: RUF001
        "run's initial adapters.",
        above=0,
    )  # fmt: skip
    stop: list[int] = setting(  # noqa: RUF009, as the others, a field
        list, (), "Tokens that end a sampled answer, and count in its loss."
    )  # fmt: skip
    replay: str | None = setting(
        Path, None, "Folder of tokens to replay: older records, or what the model itself writes.",
        may_change=True,
    )  # fmt: skip
    general: str | None = setting(
        Path, None, "Folder of tokens of a text that the run is not about.", may_change=True
    )
    order: str | None = setting(
        str, None, "Order of a step's sequences through the model.", choices=ORDERS,
        may_change=True, default_text="what the planner finds faster",
    )  # fmt: skip
