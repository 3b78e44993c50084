"""Compares the scores of lm-evaluation-harness's tasks: by the engine and by mlx-lm."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

pytestmark = pytest.mark.harness
pytest.importorskip("lm_eval", reason="`make test-slow` installs lm_eval")

import yaml
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from mlx_lm.evaluate import MLXLM
from mlx_lm.tuner.utils import load_adapters

from helpers.adapters import write_adapters
from helpers.commands import call, command, run
from mesp.bundle.reader import Bundle
from mesp.data.tokenizer import load_bundle_tokenizer

QUESTIONS = [
    {"prompt": "The President of the United", "choices": ["States", "Kings of old"], "answer": 0},
    {"prompt": "We the", "choices": ["dogs", "people", "of"], "answer": 1},
    {"prompt": "My fellow citizens of this", "choices": ["and", "house", "country"], "answer": 1},
    {"prompt": "This", "choices": ["is", "Nation", "war and all of it"], "answer": 2},
]
PAIRS = [
    {"prompt": "The President of the United", "completion": "States"},
    {"prompt": "The House of", "completion": "Representatives"},
    {"prompt": "My fellow", "completion": "cats"},
]
TEXTS = [{"text": "My fellow citizens, we stand here."}, {"text": "The people want peace. " * 9}]
METRICS = {
    "multiple_choice": ["acc", "acc_norm"],
    "loglikelihood": ["perplexity", "acc"],
    "loglikelihood_rolling": ["word_perplexity", "byte_perplexity", "bits_per_byte"],
    "generate_until": ["exact_match"],
}
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def adapters(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapters(tmp_path_factory.mktemp("tuned") / "adapters", bundle, 0.05)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for kind, metrics in METRICS.items():
        records = {"multiple_choice": QUESTIONS, "loglikelihood_rolling": TEXTS}.get(kind, PAIRS)
        data = folder / f"{kind}.jsonl"
        data.write_text("".join(json.dumps(record) + "\n" for record in records))
        task = {
            "task": f"local_{kind}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "output_type": kind,
            "doc_to_text": "{{prompt}}",
            "doc_to_target": " {{completion}}",
            "metric_list": [{"metric": metric} for metric in metrics],
        }
        if kind == "multiple_choice":
            task |= {"doc_to_choice": "{{choices}}", "doc_to_target": "answer"}
            task |= {"fewshot_split": "test"}
        elif kind == "loglikelihood_rolling":
            task |= {"doc_to_text": "", "doc_to_target": "{{text}}"}
        elif kind == "generate_until":
            task["generation_kwargs"] = {"until": [",", "."], "max_gen_toks": MAX_TOKENS}
        (folder / f"{kind}.yaml").write_text(yaml.safe_dump(task))
    return folder


class MlxModel(MLXLM):
    def __init__(self, bundle: Path, adapters: Path | None) -> None:
        super(MLXLM, self).__init__()
        self._model, self.tokenizer = Bundle(bundle).to_mlx_lm(), load_bundle_tokenizer(bundle)
        if adapters is not None:
            load_adapters(self._model, str(adapters))
        self._model.eval()
        self._max_tokens, self._batch_size, self._sampler = None, 1, None
        self.use_chat_template = False

    def loglikelihood_rolling(self, requests: list) -> list[float]:
        scores = []
        for request in requests:
            tokens = [self.tokenizer.eos_token_id, *self.tokenizer.encode(request.args[0])]
            scores.append(self._score_fn(mx.array([tokens]))[0].sum().item())
        return scores

    def generate_until(self, requests: list) -> list[str]:
        self._max_tokens = MAX_TOKENS
        try:
            return super().generate_until(requests)
        finally:
            self._max_tokens = None


def ours(bundle: Path, folder: Path, out: Path, *options: object) -> dict:
    call("evaluate", bundle, "--include-path", folder, "--out", out, *options)
    return json.loads(out.read_text())


@pytest.mark.parametrize("num_fewshot", [0, 2])
def test_figures_are_mlx_lms(
    bundle: Path, adapters: Path, tasks: Path, tmp_path: Path, num_fewshot: int
):
    kinds = list(METRICS) if num_fewshot == 0 else ["multiple_choice"]
    names = [f"local_{kind}" for kind in kinds]
    options = ("--tasks", ",".join(names), "--num-fewshot", num_fewshot, "--adapters", adapters)
    found = ours(bundle, tasks, tmp_path / "out.json", *options)
    for index, folder in enumerate((None, adapters)):
        theirs = simple_evaluate(
            model=MlxModel(bundle, folder), tasks=names, num_fewshot=num_fewshot, bootstrap_iters=0,
            task_manager=TaskManager(include_path=str(tasks)),
        )  # fmt: skip
        results = {
            (each["task"], each["metric"]): each
            for each in found["results"]
            if each["adapters"] == (folder and str(folder))
        }
        assert len(results) == sum(len(METRICS[kind]) for kind in kinds)
        for (task, metric), each in results.items():
            # The engine and mlx-lm sum float32 numbers in different orders.
            expected = theirs["results"][task][f"{metric},none"]
            assert each["value"] == pytest.approx(expected, rel=1e-4), (task, metric)
            assert each["low"] <= each["value"] <= each["high"]
            assert (each["difference"] is None) == (folder is None)
        for task in names:
            samples = found["samples"][index][task], theirs["samples"][task]
            for our, their in zip(*samples, strict=True):
                check_alike(our["filtered_resps"], their["filtered_resps"])


def check_alike(ours: list, theirs: list) -> None:
    for our, their in zip(ours, theirs, strict=True):
        if isinstance(their, tuple | list):
            assert our[0] == pytest.approx(their[0], abs=1e-4) and our[1] == their[1]
        elif isinstance(their, float):
            assert our == pytest.approx(their, rel=1e-4)
        else:
            assert our == their


def test_limit_and_chat(bundle: Path, tasks: Path, tmp_path: Path):
    options = ("--tasks", "local_generate_until,local_multiple_choice", "--limit", 2)
    plain = ours(bundle, tasks, tmp_path / "plain.json", *options)["samples"][0]
    chat = ours(bundle, tasks, tmp_path / "chat.json", *options, "--chat")["samples"][0]
    assert {len(samples) for samples in (*plain.values(), *chat.values())} == {2}
    prompt = chat["local_generate_until"][0]["arguments"][0][0]
    assert prompt == "user: The President of the United\nassistant:"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda task: task.update(generation_kwargs={"max_gen_toks": 5000}), "leave no room"),
        (lambda task: task.update(doc_to_text="{{nothing}} {{"), "cannot run local_generate"),
    ],
)
def test_a_bad_task_is_one_sentence(
    bundle: Path, tasks: Path, tmp_path: Path, change: Callable, said: str
):
    task = yaml.safe_load((tasks / "generate_until.yaml").read_text())
    change(task)
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(task))
    options = ("--tasks", "local_generate_until", "--include-path", tmp_path)
    done = run("evaluate", bundle, *options)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert said in done.stderr.splitlines()[-1]


def test_nothing_but_the_table_is_printed(bundle: Path, tasks: Path):
    line = command("evaluate", bundle, "--tasks", "local_generate_until", "--include-path", tasks)
    done = subprocess.run(line, capture_output=True, text=True, cwd=tasks)
    note = f"Note: tasks in {tasks} may run their own Python code.\n"
    assert (done.returncode, done.stderr) == (0, note)
    assert [row.split()[:3] for row in done.stdout.splitlines()] == [
        ["task", "metric", "model"],
        ["local_generate_until", "exact_match", "↑"],
    ]


def test_an_unknown_task_is_named(bundle: Path):
    done = run("evaluate", bundle, "--tasks", "nonsense")
    assert done.returncode == 2 and "no task nonsense" in done.stderr
