"""Measures what a model recalls of facts that it was taught, and what it loses.

    python tools/studies/recall.py
    python tools/studies/recall.py --way "notes with prompts" --replay 0.25
    python tools/studies/recall.py --way questions --blocks-per-step 0.25

The facts are of invented people, three of each: where they live, what they like to eat and which
animal they have. The model is asked in the words of the training data, in other words, backwards
(who lives in Oslo?) and over two facts (what does the person in Oslo like to eat?). An answer is
right if it has the wanted word. *log p* is the mean log-likelihood of the right answer to the
questions in other words. *Known* are questions that nothing was taught about. Against training
stands the prompt: all notes, or the one right note before the question.
"""

import random
import re
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))
import mesp
from demo import write_data
from demo_real import find_model
from mesp.adapters.weighted import weigh
from mesp.bundle.reader import Bundle
from mesp.commands.command import Command
from mesp.data.load import DataOptions
from mesp.data.prompts import encode_prompt
from mesp.data.tokenizer import load_bundle_tokenizer
from mesp.evaluation.evaluated_model import running_model
from mesp.runs.log import RunLog
from studies.forgetting import ask, learn, perplexities, write_texts

OUT = Path("build/recall")
SEQ_LEN = 64
BATCH_SIZE = 2
STEPS = 5  # for each fact
REPLAYING: dict[str, Any] = {"batch_size": 8, "steps": 4}  # for each fact
PROMPTS = ("Tell me about {}.", "What do you know about {}?", "Who is {}?", "Describe {}.")
WAYS = ("notes in one stream", "notes", "notes with a prompt", "notes with prompts", "questions")
MAX_TOKENS = 16
QUESTIONS = ("same words", "other words", "backwards", "two facts", "known")

CITIES = """Oslo Lima Cairo Dublin Athens Havana Quito Riga Seoul Tunis Vienna Zagreb Boston Denver
Madrid Naples Prague Sofia Warsaw Bergen Geneva Lisbon Munich Nairobi Ottawa Perth Rome Sydney
Tokyo Turin Utrecht Venice York Zurich"""
FOODS = """rice lentils olives mango pasta mussels spinach walnuts cherries pancakes tofu radishes
pears noodles beans figs oysters cabbage waffles dates salmon plums carrots sushi grapes onions
chestnuts lobster melon peas ginger honey turnips almonds"""
ANIMALS = """parrot hamster turtle goat donkey rabbit lizard pony ferret canary goldfish pigeon
llama snake hedgehog duck frog goose camel mouse sheep rooster otter owl swan raven crab pig calf
spider squirrel falcon lamb bee"""
KNOWN = {
    "What is the capital of France?": "Paris",
    "How many legs does a spider have?": "eight|8",
    "What color is the sky on a clear day?": "blue",
    "Which planet do we live on?": "Earth",
    "How many days are in a week?": "seven|7",
    "What is frozen water called?": "ice",
    "Which animal barks?": "dog",
    "What is the opposite of hot?": "cold",
    "In which country is Tokyo?": "Japan",
    "What do bees make?": "honey",
}


class Person(NamedTuple):
    name: str
    city: str
    food: str
    animal: str

    @property
    def note(self) -> str:
        return (
            f"{self.name} lives in {self.city}, likes to eat {self.food} and has a {self.animal}."
        )


class Question(NamedTuple):
    kind: str
    text: str
    answer: str
    person: Person | None = None


class Answers(NamedTuple):
    right: dict[str, list[bool]]
    log_likelihood: float


def invent(count: int, seed: int) -> list[Person]:
    draw = random.Random(seed)
    syllables = ["".join(each) for each in product("bdfgklmnprstvz", "aeiou")]
    names = ["".join(draw.sample(syllables, 3)).capitalize() for _ in range(count)]
    lists = [draw.sample(words.split(), count) for words in (CITIES, FOODS, ANIMALS)]
    return [Person(*each) for each in zip(names, *lists, strict=True)]


def ask_about(people: Sequence[Person]) -> list[Question]:
    found = []
    for p in people:
        for kind, text, answer in (
            ("same words", f"Where does {p.name} live?", p.city),
            ("same words", f"What does {p.name} like to eat?", p.food),
            ("same words", f"Which animal does {p.name} have?", p.animal),
            ("other words", f"Which city is the home of {p.name}?", p.city),
            ("other words", f"Name {p.name}'s favorite food.", p.food),
            ("other words", f"What kind of pet lives with {p.name}?", p.animal),
            ("backwards", f"Who lives in {p.city}?", p.name),
            ("backwards", f"Who likes to eat {p.food}?", p.name),
            ("backwards", f"Who has a {p.animal}?", p.name),
            ("two facts", f"What does the person who lives in {p.city} like to eat?", p.food),
            ("two facts", f"Where does the person who has a {p.animal} live?", p.city),
            ("two facts", f"Which animal does the person who eats {p.food} have?", p.animal),
        ):
            found.append(Question(kind, text, answer, p))
    return found + [Question("known", text, answer) for text, answer in KNOWN.items()]


def records(way: str, people: Sequence[Person]) -> list[dict[str, Any]]:
    if way.startswith("notes with"):
        prompts = PROMPTS[: 1 if way == "notes with a prompt" else None]
        return [
            {"prompt": each.format(p.name), "completion": p.note}
            for p in people
            for each in prompts
        ]
    if way.startswith("notes"):
        return [{"text": person.note} for person in people]
    return [
        {"prompt": each.text, "completion": each.answer}
        for each in ask_about(people)
        if each.kind == "same words"
    ]


def answer(
    bundle: Bundle, questions: Sequence[Question], adapters: Path | None, notes: str, people: list
) -> Answers:
    """`notes`: which notes precede a question in its prompt: none, all, or its own."""
    tokenizer = load_bundle_tokenizer(bundle.path)
    prompts = []
    for each in questions:
        told = {"none": [], "all": people, "own": [each.person] if each.person else people[:1]}
        lines = "".join(f"{person.note}\n" for person in told[notes])
        text = f"{lines}\n{each.text}" if lines else each.text
        prompts.append(encode_prompt(tokenizer, text, True))
    with running_model(bundle.path, weigh(adapters), tokenizer, 2048) as model:
        written = model.write(prompts, MAX_TOKENS, ())
        likely = [
            model.scores(prompt, [tokenizer.encode(each.answer, add_special_tokens=False)])[0]
            for each, prompt in zip(questions, prompts, strict=True)
            if each.kind == "other words"
        ]
    right: dict[str, list[bool]] = {kind: [] for kind in QUESTIONS}
    for each, text in zip(questions, written, strict=True):
        wanted = rf"\b({each.answer})\b"
        right[each.kind].append(re.search(wanted, text, re.IGNORECASE) is not None)
    return Answers(right, mean(score.log_likelihood for score in likely))


def export(source: str, way: str, facts: int, seed: int, people: Sequence[Person]) -> Bundle:
    data = OUT / f"{way.replace(' ', '-')}-{facts}-{seed}"
    write_data(data, train=records(way, people))
    options = DataOptions(pack=way == "notes in one stream", hold_out=0)
    return mesp.export(
        source, OUT / f"{data.name}.mesp", data=str(data), seq_len=SEQ_LEN, overwrite=True,
        data_options=options,
    )  # fmt: skip


@click.command(cls=Command)
@click.option("--model", help="As mesp-export takes it.  [default: as make demo-real]")
@click.option("--facts", default=30, show_default=True, help="Three of each person, at most 102.")
@click.option("--seeds", default=3, show_default=True)
@click.option(
    "--blocks-per-step", "shares", type=float, multiple=True,
    help="Train on the last way also with this share of the blocks a step: for as many steps, and "
    "for as long. Repeatable.",
)  # fmt: skip
@click.option(
    "--way", "ways", multiple=True, type=click.Choice(WAYS), default=WAYS,
    help="Teach only so, without the comparison to prompts. Repeatable.",
)  # fmt: skip
@click.option(
    "--replay", type=float, metavar="SHARE",
    help="Train in larger batches, with this share of texts that the model wrote.",
)  # fmt: skip
def main(
    model: str | None, facts: int, seeds: int, shares: tuple[float, ...], ways: tuple[str, ...],
    replay: float | None,
) -> None:  # fmt: skip
    """Measure recall of taught facts, and what is lost."""
    source = model or find_model()
    found: dict[str, list[tuple[Answers, dict[str, float], RunLog | None, float]]] = {}
    for seed in range(seeds):
        people = invent(facts // 3, seed)
        questions = ask_about(people)
        bundles = {way: export(source, way, facts, seed, people) for way in ways}
        bundle = bundles[ways[-1]]
        texts, own = write_texts(()), ask(bundle)
        base = perplexities(bundle, texts, own, None)

        def add(
            label: str, run: RunLog | None = None, notes: str = "none",
            seed: int = seed, bundle: Bundle = bundle, people: list = people,
            questions: list = questions, texts: dict = texts, own: list = own, base: dict = base,
        ) -> None:  # fmt: skip
            began = time.monotonic()
            adapters = run and run.adapters
            answers = answer(bundle, questions, adapters, notes, people)
            seconds = (time.monotonic() - began) / len(questions)
            lost = perplexities(bundle, texts, own, adapters) if run else base
            lost = {name: value / base[name] - 1 for name, value in lost.items()}
            found.setdefault(label, []).append((answers, lost, run, seconds))

        if ways == WAYS:
            add("nothing")
            add("all notes in the prompt", notes="all")
            add("the right note in the prompt", notes="own")
        options: dict[str, Any] = {"seed": seed, "val_batches": 0}
        options |= {"batch_size": BATCH_SIZE, "steps": STEPS * facts}
        if replay:
            options |= REPLAYING | {"steps": REPLAYING["steps"] * facts, "replay": replay}
        for way in ways:
            out = OUT / "runs" / f"{bundles[way].path.stem}{f'-{replay:g}' if replay else ''}"
            run = learn(bundles[way], out, **options)
            add(f"trained on {way}{' and replay' if replay else ''}", run)
        for share in shares:
            label = f"{ways[-1]}, {share:g} of the blocks"
            out = OUT / "runs" / f"{bundle.path.stem}-{share:g}-of-the-blocks"
            options["blocks_per_step"] = share
            same = learn(bundle, out, **options)
            add(f"{label}, same steps", same)
            steps = round(run.last_step * run.end["seconds"] / same.end["seconds"])
            long = learn(bundle, out.with_name(f"{out.name}-long"), **options | {"steps": steps})
            add(f"{label}, same time", long)
        Console(width=200, highlight=False).print(make_table(found, facts))
    draw(found, OUT / "recall.png")


def make_table(found: dict[str, list], facts: int) -> Table:
    columns = ("log p", "docs", "code", "answers", "steps", "s", "peak MB", "s/answer")
    table = Table("way", *QUESTIONS, *columns, title=f"{facts} facts")
    for label, each in found.items():
        runs = [run for _, _, run, _ in each if run]
        table.add_row(
            label,
            *(
                "/".join(str(sum(answers.right[kind])) for answers, *_ in each)
                + f" of {len(each[0][0].right[kind])}"
                for kind in QUESTIONS
            ),
            f"{mean(answers.log_likelihood for answers, *_ in each):.2f}",
            *(f"{mean(lost[name] for _, lost, *_ in each):+.1%}" for name in each[0][1]),
            f"{mean(run.last_step for run in runs):.0f}" if runs else "",
            f"{mean(run.end['seconds'] for run in runs):.0f}" if runs else "",
            f"{max(run.peak_bytes or 0 for run in runs) / 1e6:.1f}" if runs else "",
            f"{mean(seconds for *_, seconds in each):.2f}",
        )
    return table


def draw(found: dict[str, list], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot()
    for index, kind in enumerate(QUESTIONS):
        shares = [
            mean(x for answers, *_ in each for x in answers.right[kind]) for each in found.values()
        ]
        axes.barh([y - index * 0.15 for y in range(len(found))], shares, 0.14, label=kind)
    axes.set_yticks([y - 0.3 for y in range(len(found))], list(found))
    axes.set_xlabel("share of right answers")
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
