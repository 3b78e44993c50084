from __future__ import annotations

import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mesp.data.chat_template import apply_template
from mesp.data.hub_datasets import refuse_scripts
from mesp.errors import MespError
from mesp.evaluation.evaluated_model import EvaluatedModel
from mesp.evaluation.metrics import Metric, exponential, mean

os.environ.setdefault("TQDM_DISABLE", "1")
try:
    import datasets
    import lm_eval
    import lm_eval.evaluator
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise MespError("--tasks needs lm-evaluation-harness: pip install 'mesp[harness]'.") from error

refuse_scripts(datasets)
logging.getLogger("lm_eval").setLevel(logging.ERROR)
datasets.disable_progress_bars()
# The harness's own function runs git, which prints an error outside of a repository.
lm_eval.evaluator.get_git_commit_hash = lambda: None

DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True)
class Tasks:
    names: tuple[str, ...]
    include_path: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    chat: bool = False

    def manager(self) -> TaskManager:
        """Raises MespError if the manager lacks one of `names`."""
        include = None if self.include_path is None else str(self.include_path)
        manager = TaskManager(include_path=include)
        for name in self.names:
            if not manager.match_tasks([name]):
                raise MespError(
                    f"lm-evaluation-harness has no task {name}; `lm-eval ls tasks` lists what it "
                    "has, and --include-path adds a folder of others."
                )
        return manager


class HarnessModel(TemplateLM):
    def __init__(
        self, model: EvaluatedModel, advance: Callable[[], None], kwargs: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.model, self.tokenizer, self.advance = model, model.tokenizer, advance
        self.kwargs = kwargs
        self.special = True

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        return self.model.prefix_token

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        self.special = False
        return apply_template(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self.kwargs,
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        special = self.special if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer.encode(string, add_special_tokens=special))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[Any]:
        return list(super().loglikelihood(requests, disable_tqdm=True))

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Returns each continuation's log-likelihood, and whether greedy decoding would
        write it.
        """
        by_prompt: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            by_prompt[tuple(request[1])].append(index)
        answers: dict[int, tuple[float, bool]] = {}
        for prompt, indices in by_prompt.items():
            scores = self.model.scores([*prompt], [requests[index][2] for index in indices])
            for index, score in zip(indices, scores, strict=True):
                answers[index] = (score.log_likelihood, score.is_greedy)
                self.advance()
        return [answers[index] for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        return [self._each(lambda text: self.model.log_likelihood(text)[0], r) for r in requests]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return [self._each(self._write, request) for request in requests]

    def _each(self, method: Callable[..., Any], request: Any) -> Any:
        answer = method(*request.args)
        self.advance()
        return answer

    def _write(self, prompt: str, options: dict[str, Any]) -> str:
        if (options.get("temperature") or 0) > 0 and options.get("do_sample") is not False:
            raise MespError("the task draws its answers, and mesp evaluate takes the likeliest")
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else until
        max_tokens = options.get("max_gen_toks", DEFAULT_MAX_TOKENS)
        tokens = self.tok_encode(prompt) or [self.prefix_token_id]
        return self.model.write([tokens], max_tokens, [stop for stop in stops if stop])[0]


def run(
    model: EvaluatedModel,
    advance: Callable[[], None],
    tasks: Tasks,
    manager: TaskManager,
    kwargs: Mapping[str, Any],
) -> tuple[list[Metric], dict[str, Any]]:
    if tasks.chat and not model.tokenizer.has_chat_template:
        raise MespError("The bundle's tokenizer has no chat template; leave out --chat.")
    try:
        results = lm_eval.simple_evaluate(
            model=HarnessModel(model, advance, kwargs),
            tasks=list(tasks.names),
            task_manager=manager,
            num_fewshot=tasks.num_fewshot,
            limit=tasks.limit,
            apply_chat_template=tasks.chat,
            # `mesp.evaluation.metrics.compare` computes a paired bootstrap instead
            bootstrap_iters=0,
        )
    except BrokenPipeError:
        raise
    except MespError as error:
        raise MespError(f"{', '.join(tasks.names)}: {error.message.rstrip('.')}.") from error
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise MespError(
            f"lm-evaluation-harness cannot run {', '.join(tasks.names)}: {reason}"
        ) from error
    samples = results.get("samples", {})
    metrics = []
    for task, figures in results["results"].items():
        higher = results.get("higher_is_better", {}).get(task, {})
        for key, value in figures.items():
            name, _, filtered = key.partition(",")
            if not filtered or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            values = [
                each.get(name) for each in samples.get(task, ()) if each["filter"] == filtered
            ]
            label = name if filtered == "none" else f"{name} ({filtered})"
            known = {"task": task, "higher_is_better": higher.get(name) is not False}
            metrics.append(_metric(label, float(value), values, **known))
    return metrics, samples


def _metric(name: str, value: float, values: Sequence[Any], **known: Any) -> Metric:
    try:
        columns = np.asarray(values, float)
    except (TypeError, ValueError):
        columns = np.empty(0)
    if columns.ndim == 2 and columns.shape[1] == 2:
        sums, weights = columns.T
    elif columns.ndim == 1:
        sums, weights = columns, np.ones(len(columns))
    else:
        sums = weights = np.empty(0)
    finals = (mean, lambda value: exponential(-value), lambda value: -value / math.log(2))
    for final in finals if len(sums) else ():
        metric = Metric.of(name, sums, weights, final=final, **known)
        if math.isclose(metric.value, value, rel_tol=1e-9, abs_tol=1e-12):
            return metric
    return Metric(name, value, **known)
