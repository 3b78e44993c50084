import json
import os
import re
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from helpers.commands import invoke, refused, succeeded
from helpers.pages import Page
from helpers.runs import write_run
from mesp.commands.report import main
from mesp.runs.log import RunLog

pytest.importorskip("matplotlib")


def report(*arguments: object) -> subprocess.CompletedProcess:
    return invoke(main, "mesp report", *arguments)


def made(out: Path, *runs: Path) -> Page:
    done = succeeded(report(*runs, "--out", out))
    assert done.stdout == f"{out}\n"
    return Page(out)


def add(run: Path, *records: dict) -> Path:
    with (run / "metrics.jsonl").open("a") as log:
        log.writelines(json.dumps(record) + "\n" for record in records)
    return run


def change(run: Path, kind: str, entries: Callable[[dict], dict]) -> Path:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    changed = (each | entries(each) if each["type"] == kind else each for each in records)
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in changed))
    return run


def with_settings(run: Path, **settings: object) -> Path:
    return change(run, "start", lambda start: {"settings": start["settings"] | settings})


def test_a_page_of_several_runs_stands_alone(tmp_path: Path):
    write_run(tmp_path / "runs" / "a<b>$x$")
    write_run(tmp_path / "runs" / "unfinished", steps=1, end=None)
    begun = write_run(tmp_path / "elsewhere" / "unfinished", steps=0, end=None)
    page = made(tmp_path / "new" / "report.html", tmp_path / "runs", begun)
    assert page.row("") == ["a<b>$x$", "unfinished", "unfinished (2)"]
    assert page.row("model") == ["Qwen2.5-0.5B"] * 3
    assert page.row("loss, nats a token") == ["4.00 → 3.70", "4.00 → 4.00", "-"]
    assert page.row("held-out, nats a token")[0] == "4.51 → 3.77"
    assert page.row("peak MB") == ["61.2", "50.0", "-"]
    assert page.row("seq_len") == ["256"] * 3
    assert page.source.count("<svg") == 3
    assert "a<b>$x$, training" in page.text, "the legend has the name as it is"
    assert all(each.lstrip("'\"").startswith("#") for each in page.references)
    assert "http" not in page.source and "@import" not in page.source, "nothing from elsewhere"
    names = re.findall(r'id="([^"]+)"', page.source)
    assert len(names) == len(set(names)), "a name in one picture is not one in another"


def test_settings_that_do_not_apply_are_left_out(tmp_path: Path):
    def run(name: str, **settings: object) -> Path:
        return with_settings(write_run(tmp_path / name), **settings)

    common = {"mezo_epsilon": 1e-3, "momentum": 0, "beta1": 0.9}
    common |= {"max_tokens": 128, "dry_run": False}
    mezo = run("mezo", method="mezo", optimizer="sgd", stop=[], **common)
    adam = run("adam", method="mesp", optimizer="adamw8bit", replay_text=None, **common)
    page = made(tmp_path / "report.html", mezo, adam)
    assert page.row("mezo_epsilon") == ["0.001", "-"]
    assert page.row("momentum") == ["0", "-"] and page.row("beta1") == ["-", "0.9"]
    for name in ("max_tokens", "dry_run", "stop", "replay_text"):
        assert name not in page.text
    sampled = made(tmp_path / "sampled.html", run("sampled", group_size=4, **common))
    assert sampled.row("max_tokens") == ["128"]


def test_losses_have_their_unit_and_points_no_line(tmp_path: Path):
    supervised = made(tmp_path / "a.html", write_run(tmp_path / "supervised"))
    assert supervised.row("loss, nats a token") == ["4.00 → 3.70"]
    assert "stroke-dasharray: 5.55,2.4" not in supervised.source
    preferred = with_settings(write_run(tmp_path / "preferred"), objective="dpo")
    page = made(tmp_path / "b.html", preferred)
    assert page.row("loss") == ["4.00 → 3.70"] and "nats" not in page.text


def test_a_run_of_many_steps_is_drawn_in_few_points(tmp_path: Path):
    page = made(tmp_path / "report.html", write_run(tmp_path / "long", steps=20_000))
    assert len(page.source) < 1_500_000


def test_rewards_are_drawn_beside_the_loss(tmp_path: Path):
    def figures(step: dict) -> dict:
        return {"reward": step["step"] / 4, "sampled_tokens": 600, "sampling_seconds": 2.5}

    rewarded, plain = (write_run(tmp_path / name) for name in ("run", "plain"))
    page = made(tmp_path / "report.html", change(rewarded, "step", figures), plain)
    assert page.row("reward") == ["0.25 → 1.00", "-"]
    assert page.row("sampled") == ["2,400 tokens in 10 s", "-"]
    assert page.source.count("<svg") == 4 and "Reward" in page.text


def test_the_plan_the_phases_and_the_test_are_there(tmp_path: Path):
    phases = {"forward_seconds": 0.1, "loss_seconds": 0.1, "backward_seconds": 0.25}

    run = change(write_run(tmp_path / "run"), "step", lambda _: phases)
    add(run, {"type": "plan", "predicted_peak_bytes": 66_600_000})
    add(run, {"type": "eval", "split": "test", "step": 4, "loss": 3.99, "tokens": 256})
    page = made(tmp_path / "report.html", run)
    assert page.row("predicted MB") == ["66.6"] and "run, predicted" in page.text
    assert page.row("test, nats a token") == ["3.99"] and "run, test" in page.text
    assert page.row("best held-out, nats a token") == ["3.77 at step 4"]
    for phase in ("forward", "loss", "backward"):
        assert phase in page.text
    old = made(tmp_path / "old.html", write_run(tmp_path / "before phases were measured"))
    assert "backward" not in old.text and "predicted MB" not in old.text
    both = made(tmp_path / "both.html", run, tmp_path / "before phases were measured")
    assert "backward" in both.text and both.row("predicted MB") == ["66.6", "-"]


def test_settings_that_differ_stand_out(tmp_path: Path):
    runs = write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1)
    page = made(tmp_path / "report.html", *runs)
    assert page.row("seed") == ["0", "1"]
    assert '<tr class="differs"><th>seed</th>' in page.source
    assert "<tr><th>rank</th>" in page.source


def test_events_and_samples_are_shown_as_text(tmp_path: Path):
    run = write_run(tmp_path / "run")
    add(run, {"type": "event", "event": "paused", "message": "<i>hot</i>", "time": "2026-01-01"})
    samples = [{"prompt": "A <b>class</b>", "before": "old words", "after": "new\nwords"}]
    (run / "samples.json").write_text(json.dumps(samples))
    page = made(tmp_path / "report.html", run)
    for text in ("2026-01-01: paused", "<i>hot</i>", "A <b>class</b>", "old words", "new\nwords"):
        assert text in page.text
    assert "<i>" not in page.source and "<b>class" not in page.source


@pytest.mark.parametrize(
    "text",
    ["[", '["before"]', '{"prompt": 1}', '[{"prompt": "a"}]', "7", 100_000 * "[", 17_000_000 * " "],
    ids=lambda text: text[:8],
)
def test_samples_that_are_none_are_named(tmp_path: Path, text: str):
    path = write_run(tmp_path / "run") / "samples.json"
    path.write_text(text)
    said = refused(report(tmp_path / "run", "--out", tmp_path / "report.html"))
    assert said == f"{path} is not a list of samples with prompt, before and after."


STEP = {"type": "step", "step": 5, "loss": 2.5, "seconds": 0.5, "tokens": 64}
STEP |= {"footprint_bytes": 1, "footprint_peak_bytes": 1}


@pytest.mark.parametrize(
    "record",
    [
        {"type": "start", "host": 7},
        {"type": "start", "time": 7},
        {"type": "start", "settings": {"rank": json.loads(900 * "[" + 900 * "]")}},
        {"type": "plan", "predicted_peak_bytes": "much"},
        {"type": "eval", "step": 1, "loss": 1, "split": ["valid"]},
        {"type": "event", "event": 7, "message": "a"},
        {"type": "event", "message": ["a"]},
        STEP | {"reward": "high"},
        STEP | {"forward_seconds": "long"},
    ],
    ids=lambda record: " ".join([record["type"], *record][-2:]),
)
def test_a_record_of_other_types_is_named(tmp_path: Path, record: dict):
    run = add(write_run(tmp_path / "run"), record)
    said = refused(report(run, "--out", tmp_path / "report.html"))
    assert said.endswith("is not a log record.")


def test_a_log_of_one_endless_line_is_refused(tmp_path: Path):
    run = write_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "r+b") as log:
        log.truncate(1 << 29)
    said = refused(report(run, "--out", tmp_path / "report.html"))
    assert "has more than 256 MiB" in said


def test_a_time_beyond_the_years_is_none(tmp_path: Path):
    run = write_run(tmp_path / "run", end=None)
    add(run, {"type": "x", "time": "0001-01-01T00:00+23:59"})
    assert made(tmp_path / "report.html", run).row("state") == ["killed"]


@pytest.mark.parametrize(
    ("ahead", "state"), [(timedelta(minutes=5), "running"), (timedelta(days=1), "killed")]
)
def test_a_run_of_the_future_is_silent(tmp_path: Path, ahead: timedelta, state: str):
    time = (datetime.now(UTC) + ahead).isoformat()
    run = add(write_run(tmp_path / "run", end=None), {"type": "x", "time": time})
    assert made(tmp_path / "report.html", run).row("state") == [state]


def test_the_page_is_written_through_no_link(tmp_path: Path):
    run, kept, out = write_run(tmp_path / "run"), tmp_path / "kept", tmp_path / "report.html"
    kept.write_text("kept")
    out.symlink_to(kept)
    made(out, run)
    assert kept.read_text() == "kept" and not out.is_symlink()


def test_a_folder_whose_name_is_no_text(tmp_path: Path):
    run = write_run(Path(os.fsdecode(os.fsencode(tmp_path) + b"/run\xff")))
    made(tmp_path / "report.html", run)


@pytest.mark.parametrize(
    ("out", "sentence"),
    [
        ("report.pdf", "--out {tmp}/report.pdf must end in .html."),
        ("report.html", "There is no run in {tmp}/empty."),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, out: str, sentence: str):
    (tmp_path / "empty").mkdir()
    said = refused(report(tmp_path / "empty", "--out", tmp_path / out))
    assert said == sentence.format(tmp=tmp_path)


def test_a_run_without_steps_has_an_empty_table():
    table = RunLog().to_pandas()
    assert table.empty and table.index.name == "step"
