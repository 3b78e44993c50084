from __future__ import annotations

from itertools import compress
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest

from helpers.commands import call
from helpers.data import assistant, examples_of, load_records, user, write_records
from helpers.models import load_lora
from helpers.paths import DEMO_MODEL
from helpers.preferences import TRL
from mesp import reference
from mesp.bundle.reader import Bundle
from mesp.data.prompts import encode_prompt
from mesp.data.records import BAD, CHOSEN, GOOD, REJECTED
from mesp.data.tokenizer import load_tokenizer
from mesp.engine.build import find_engine
from mesp.errors import MespError
from mesp.runs.log import RunLog

PAIR = {"prompt": "The dog", "chosen": " is lazy.", "rejected": " jumps over the fox."}
LABELLED = [
    {"prompt": "The dog", "completion": " is lazy.", "label": True},
    {"prompt": "The fox", "completion": " minds.", "label": False},
]
ASK, FOX, DOG = [user("Who jumps?")], [assistant("The fox.")], [assistant("The dog.")]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEMO_MODEL)


def rows(split) -> list[tuple[list[int], list[int], int]]:
    examples = zip(examples_of(split), split.labels.tolist(), strict=True)
    return [(ids, [*compress(ids, mask)], label) for (ids, mask), label in examples]


def test_a_pair_is_two_answers_with_the_end_of_text(tokenizer, tmp_path):
    train = rows(load_records(tmp_path, [PAIR] * 3, tokenizer, chat=False)["train"])
    assert len(train) == 4, "two pairs; the third is held out"
    prompt = tokenizer.encode(PAIR["prompt"])
    for (ids, answer, label), key in zip(train, ["chosen", "rejected"] * 2, strict=True):
        assert ids == [*tokenizer.encode(PAIR["prompt"] + PAIR[key]), tokenizer.eos_token_id]
        assert ids == prompt + answer
        assert label == (CHOSEN if key == "chosen" else REJECTED)


def test_labels(tokenizer, tmp_path):
    train = rows(load_records(tmp_path, LABELLED * 2, tokenizer, chat=False)["train"])
    assert [label for *_, label in train] == [GOOD, BAD, GOOD]
    assert tokenizer.decode(train[1][1]) == " minds." + tokenizer.eos_token


@pytest.mark.parametrize("chat", [None, True, False])
def test_one_model_is_taught_one_form(tokenizer, tmp_path, chat):
    asked, answer = "Who jumps?", "The fox."
    pair = {"prompt": asked, "chosen": answer, "rejected": "The dog."}
    label = {"prompt": asked, "completion": answer, "label": True}
    completion = [{"prompt": asked, "completion": answer}] * 2
    split = load_records(tmp_path, completion, tokenizer, chat=chat)["train"]
    ((ids, mask),) = examples_of(split)
    counted = [*compress(ids, mask)]
    for records in ([pair] * 2, [label, label | {"label": False}] * 2):
        first = rows(load_records(tmp_path, records, tokenizer, chat=chat)["train"])[0]
        assert first[0][: len(ids)] == ids
        assert first[1][: len(counted)] == counted
    prompt = encode_prompt(tokenizer, asked, chat)
    assert ids[: len(prompt)] == prompt and not any(mask[: len(prompt)])
    assert ("assistant:" in tokenizer.decode(ids)) == (chat is not False)


def test_without_a_template_strings_are_joined(tokenizer, tmp_path):
    plain = load_tokenizer(DEMO_MODEL)
    plain.has_chat_template, plain.chat_template = False, None
    for records in ([PAIR] * 2, LABELLED * 2, [{"prompt": "a", "completion": " b"}] * 2):
        one, other = (
            load_records(tmp_path, records, *each)["train"] for each in ((plain,), (tokenizer, 64))
        )
        joined = load_records(tmp_path, records, tokenizer, chat=False)["train"]
        assert one.tokens.tolist() == joined.tokens.tolist() != other.tokens.tolist()


CONVERSATION = {"prompt": ASK, "chosen": FOX, "rejected": DOG}
TEXTS = {"chosen": "The dog is", "rejected": "The dog minds"}
TEXT = {"text": "The dog"}
THROUGH = "has messages, which go through the chat template: leave out `chat=False`"


@pytest.mark.parametrize(
    ("record", "chat", "has_template", "reason"),
    [
        (PAIR, True, False, "has no chat template: leave out `chat`"),
        (CONVERSATION, False, True, THROUGH),
        (CONVERSATION, None, False, "no chat template, which its messages need"),
        (TEXTS, True, True, "Line 1 of .* it has no prompt, which the chat template needs"),
        (TEXT, True, True, "has text, which has no prompts"),
    ],
)
def test_a_template_that_cannot_be_used_is_said(tmp_path, record, chat, has_template, reason):
    own = load_tokenizer(DEMO_MODEL)
    if not has_template:
        own.has_chat_template, own.chat_template = False, None
    with pytest.raises(MespError, match=reason):
        load_records(tmp_path, [record] * 2, own, chat=chat)


def test_messages_go_through_the_template(tokenizer, tmp_path):
    records = [CONVERSATION, {"chosen": ASK + FOX, "rejected": ASK + DOG}]
    explicit, implicit = (
        rows(load_records(tmp_path, [record] * 2, tokenizer)["train"]) for record in records
    )
    assert explicit == implicit
    prompt = tokenizer.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False)
    for (ids, answer, _), messages in zip(explicit, (ASK + FOX, ASK + DOG), strict=True):
        assert ids == tokenizer.apply_chat_template(messages, return_dict=False)
        assert ids == prompt + answer


def test_a_pair_of_texts_without_a_prompt_begins_alike(tokenizer, tmp_path):
    whole = {"chosen": "The dog is lazy.", "rejected": "The dog jumps over the fox."}
    found = rows(load_records(tmp_path, [whole] * 2, tokenizer)["train"])
    assert found == rows(load_records(tmp_path, [PAIR] * 2, tokenizer, chat=False)["train"])


def test_a_long_answer_is_cut(tokenizer, tmp_path, caplog):
    long = PAIR | {"rejected": " jumps" * 100}
    train = load_records(tmp_path, [long] * 2, tokenizer, 16, chat=False)["train"]
    assert [len(ids) for ids, *_ in rows(train)][1] == 17
    assert "longer than 17 tokens were cut: 1 in train" in caplog.text


BAD_RECORDS = {
    "equal": (PAIR | {"rejected": PAIR["chosen"]}, "chosen and a rejected answer that are equal"),
    "empty": (PAIR | {"chosen": " "}, "an empty answer"),
    "empty list": (CONVERSATION | {"chosen": []}, "an empty answer"),
    "empty message": (CONVERSATION | {"rejected": [assistant("")]}, "an empty answer"),
    "no prompt": (PAIR | {"prompt": ""}, "has no prompt"),
    "nothing alike": ({"chosen": "a", "rejected": "b"}, "has no prompt"),
    "long prompt": (PAIR | {"prompt": "The dog" * 99}, "leaves no room for an answer in 65"),
    "no string": (PAIR | {"chosen": 3}, "neither a string nor a list of messages"),
    "column": ({"prompt": "a", "chosen": "b"}, "has prompt, chosen; records have"),
    "label": (LABELLED[0] | {"label": "yes"}, 'a "label" that is neither true nor false'),
    "no prompt of a label": ({"completion": "b", "label": True}, "has completion, label; records"),
    "alike": (LABELLED[0], "labels of .* are alike"),
}


@pytest.mark.parametrize("case", BAD_RECORDS)
def test_what_cannot_be_used_is_said_in_a_sentence(tokenizer, tmp_path, case):
    record, reason = BAD_RECORDS[case]
    with pytest.raises(MespError, match=reason) as error:
        load_records(tmp_path, [record] * 3, tokenizer, 64)
    assert "\n" not in error.value.message


@pytest.mark.parametrize("options", [{"pack": True}, {"loss_on": "all"}], ids=["pack", "loss_on"])
def test_answers_are_one_a_sequence_and_alone_in_the_loss(tokenizer, tmp_path, options):
    with pytest.raises(MespError, match="leave out `"):
        load_records(tmp_path, [PAIR] * 2, tokenizer, **options)


SEQ_LEN, RANK = 24, 4
# DPO runs for more steps than the other losses, so that small errors of a step add up.
STEPS = {"dpo": 40, "ipo": 10, "simpo": 10, "orpo": 10, "kto": 10}
# IPO's gradient is much larger than DPO's, so its learning rate is lower.
RATES = {"dpo": 0.05, "ipo": 1e-3, "simpo": 0.05, "orpo": 0.05, "kto": 0.05}


@pytest.fixture(scope="module")
def bundle(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    find_engine()
    folder = tmp_path_factory.mktemp("pairs")
    generator = np.random.default_rng(0)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "minds"]

    def text(low: int, high: int) -> str:
        chosen = generator.choice(words, generator.integers(low, high))
        return "".join(f" {word}" for word in chosen)

    records = [
        {"prompt": text(2, 6)[1:], "chosen": text(2, 8), "rejected": text(2, 8)} for _ in range(30)
    ]
    files = ("--data", write_records(folder / "pairs.jsonl", records), "--out", folder / "tiny")
    call("export", "--model", tiny, *files, "--seq-len", SEQ_LEN, "--rank", RANK)
    return folder / "tiny"


def independent(bundle: Path, objective: str, steps: int) -> list[float]:
    """Returns the losses of training by TRL's formulas.

    The training uses mlx-lm's model with LoRA, `mlx.nn.value_and_grad`, and the SGD of
    `mlx.optimizers`.
    """
    opened = Bundle(bundle)
    arch, model = opened.architecture, opened.to_mlx_lm()
    model.freeze()
    start = reference.init_lora(arch, RANK, 0)
    for layer, flat, block in zip(model.layers, start, arch.blocks, strict=True):
        load_lora(layer, flat, block, scale=2.0)
    tokens, mask, labels = (getattr(opened, name)("train") for name in ("tokens", "mask", "labels"))
    sequences = []
    for start, length in opened.examples("train").tolist():
        ids = mx.array(tokens[start : start + length].astype(np.int32))
        prompt = int(np.argmax(mask[start : start + length]))
        sequences.append((ids, prompt))

    def logps(window: mx.array, prompt: int) -> tuple[mx.array, mx.array]:
        every = mx.take_along_axis(
            nn.log_softmax(model(window[None, :-1])[0], axis=-1), window[1:, None], axis=-1
        )[:, 0]
        return every[prompt - 1 :].sum(), -every.sum()

    def mismatched(one, other) -> tuple[mx.array, int]:
        (ids, prompt), (others, start) = one, other
        return mx.concatenate([ids[:prompt], others[start:]])[: SEQ_LEN + 1], prompt

    def of_batch(batch) -> mx.array:
        return mx.stack([logps(*each)[0] for each in batch])

    def batch_at(step: int) -> list[int]:
        units = len(sequences) if objective == "kto" else len(sequences) // 2
        order = [reference.step_window(2 * step + i, 0, units) for i in range(2)]
        return order if objective == "kto" else [2 * each + i for each in order for i in (0, 1)]

    batches = [batch_at(step) for step in range(steps)]
    others = [
        [mismatched(sequences[i], sequences[j]) for i, j in zip(b, b[-1:] + b[:-1], strict=True)]
        for b in batches
    ]
    first = [of_batch([sequences[i] for i in batch]) for batch in batches]
    first_others = [of_batch(each) for each in others] if objective == "kto" else []
    mx.eval(first, first_others)
    trl = TRL(0.1, desirable_weight=1.0)
    losses, optimizer = [], optim.SGD(RATES[objective])
    for step, batch in enumerate(batches):

        def loss(model, step=step, batch=batch):
            chosen = [sequences[i] for i in batch]
            if objective == "kto":
                return trl.kto(
                    of_batch(chosen), first[step], of_batch(others[step]), first_others[step],
                    mx.array(labels[batch] % 2 == 1),
                )  # fmt: skip
            both = [logps(*each) for each in chosen]
            sums = mx.stack([each for each, _ in both])
            counts = mx.array([float(ids.size - prompt) for ids, prompt in chosen])
            return getattr(trl, {"dpo": "sigmoid"}.get(objective, objective))(
                chosen_logps=sums[::2], rejected_logps=sums[1::2],
                ref_chosen_logps=first[step][::2], ref_rejected_logps=first[step][1::2],
                chosen_count=counts[::2], rejected_count=counts[1::2],
                chosen_nll_loss=sum(nll for _, nll in both[::2])
                / sum(ids.size - 1 for ids, _ in chosen[::2]),
            )  # fmt: skip

        value, gradients = nn.value_and_grad(model, loss)(model)
        optimizer.update(model, gradients)
        mx.eval(value, model.parameters())
        losses.append(value.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["dpo", "ipo", "simpo", "orpo", "kto"])
def test_steps_are_those_of_an_independent_trainer(bundle, tmp_path, objective):
    steps = STEPS[objective]
    options = ("--objective", objective, "--steps", steps, "--batch-size", 2, "--alpha", 2 * RANK)
    options += ("--optimizer", "sgd", "--learning-rate", RATES[objective], "--val-batches", 2)
    done = call("train", bundle, *options, "--out", tmp_path / "run")
    assert "accuracy" in done.stdout and "perplexity" not in done.stdout
    trained = RunLog.load(tmp_path / "run")
    # The engine and MLX sum float32 numbers in different orders. The difference grows with the
    # steps.
    expected = independent(bundle, objective, steps)
    assert trained.losses == pytest.approx(expected, rel=1e-3 if steps == 40 else 1e-4)
    for step in trained.steps:
        assert step["margin"] is None or step["margin"] == pytest.approx(
            step["reward_chosen"] - step["reward_rejected"], abs=1e-5
        )
        assert 0 <= step["accuracy"] <= 1
        assert step["input_tokens"] > step["tokens"] > 0
        assert ("kl" in step) == (objective in ("dpo", "ipo", "kto"))


@pytest.mark.slow
def test_a_run_takes_up_its_references_again(bundle, tmp_path):
    options = ("--objective", "dpo", "--learning-rate", 1e-3, "--val-batches", 2)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for output, steps in ((whole, 6), (parts, 3)):
        call("train", bundle, *options, "--steps", steps, "--out", output)
    assert len(mx.load(str(parts / "state.safetensors"))["reference.answers"]) == 2 * (3 + 2)
    call("train", "--resume", "--out", parts, "--steps", 6)
    assert RunLog.load(parts).losses == RunLog.load(whole).losses
    # The reference is the model with the initial adapters, so the loss of the first step is log 2.
    start = ("--adapters", whole / "adapters", "--steps", 1)
    call("train", bundle, *options, *start, "--out", tmp_path / "again")
    assert RunLog.load(tmp_path / "again").losses == pytest.approx([np.log(2)], rel=1e-5)
