"""MeSP: exact, memory-efficient LoRA fine-tuning of quantized language models.

    bundle = mesp.export("Qwen2.5-0.5B", data="chats.jsonl", seq_len=256)
    run = mesp.train(bundle, steps=200, memory_limit=60)
    print(mesp.generate(bundle, "Turn on the light", adapters=run.adapters))
    print(mesp.evaluate(bundle, "test.jsonl", adapters=run.adapters))

Nothing is printed: functions report progress to a `progress` function, and notes go to the logger
``mesp``. A function that cannot do its work raises `MespError`, whose text is a sentence for
people.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mesp.bundle.export import export, rewrite
    from mesp.bundle.reader import Bundle, load
    from mesp.data.load import DataOptions
    from mesp.data.sources import Selection
    from mesp.engine.generate import TextStream, generate
    from mesp.engine.train import train
    from mesp.errors import EngineError, Interrupted, MespError
    from mesp.evaluation.evaluate import Evaluation, evaluate
    from mesp.progress import Progress
    from mesp.runs.log import RunLog
    from mesp.settings.train_settings import TrainSettings

__all__ = [
    "Bundle",
    "DataOptions",
    "EngineError",
    "Evaluation",
    "Interrupted",
    "MespError",
    "Progress",
    "RunLog",
    "Selection",
    "TextStream",
    "TrainSettings",
    "__version__",
    "evaluate",
    "export",
    "generate",
    "load",
    "rewrite",
    "train",
]

# The public names of each module. A module is imported when one of its names is first used, because
# MLX loads slowly.
_MODULES = {
    "mesp.bundle.export": ("export", "rewrite"),
    "mesp.bundle.reader": ("Bundle", "load"),
    "mesp.data.load": ("DataOptions",),
    "mesp.data.sources": ("Selection",),
    "mesp.engine.generate": ("TextStream", "generate"),
    "mesp.engine.train": ("train",),
    "mesp.errors": ("EngineError", "Interrupted", "MespError"),
    "mesp.evaluation.evaluate": ("Evaluation", "evaluate"),
    "mesp.progress": ("Progress",),
    "mesp.runs.log": ("RunLog",),
    "mesp.settings.train_settings": ("TrainSettings",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
