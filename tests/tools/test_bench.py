import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import main
from helpers.commands import call, invoke, refused, succeeded
from helpers.models import TEXT, TINY, write_model
from studies.benchmarks import bits, paper_page, tables

# Upper bounds on a step's evals and kernels on a phone's GPU, by sequence length. Lower them if a
# change lowers the counts.
MOST_EVALS = {256: 138, 1024: 138}
MOST_KERNELS = {256: 2803, 1024: 6626}
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="a ledger is recorded on Linux only")


def bench(*arguments: object) -> subprocess.CompletedProcess:
    return invoke(main, "bench.py", *arguments, env={"OPENBLAS_NUM_THREADS": "1"})


def measured(folder: Path, *arguments: object) -> list[dict]:
    file = folder / "rows.json"
    succeeded(bench(*arguments, "--work", folder / "work", "--json", file))
    return json.loads(file.read_text())["rows"]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", TINY)


@pytest.mark.slow
def test_every_way_to_train_is_measured(model: Path, tmp_path: Path):
    methods = "mesp,mebp,mezo,mesp-paper,mesp-store-h,mlx-lm-checkpoint-fast"
    size = ("--model", model, "--seq-len", 16, "--steps", 2, "--work", tmp_path / "work")
    done = succeeded(
        bench(*size, "--methods", methods, "--offload", "each", "--json", tmp_path / "rows.json")
    )
    assert done.stderr == ""

    rows = {row["variant"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    of_mesp = ["mesp in memory", "mesp inputs on disk", "mesp state on disk"]
    of_mebp = ["mebp in memory", "mebp inputs on disk", "mebp state on disk"]
    of_mezo = ["mezo in memory", "mezo state on disk"]
    of_engine = [*of_mesp, *of_mebp, *of_mezo]
    assert list(rows) == [*of_engine, *methods.split(",")[3:]]
    for row in rows.values():
        assert (row["model"], row["blocks"], row["seq_len"], row["rank"]) == ("tiny", 3, 16, 8)
        assert row["error"] is None and row["os"] and row["cpu"]
        assert row["seconds"] > 0 and row["steps"] == 2
        assert row["footprint_peak_bytes"] > row["mlx_peak_bytes"] > 0
        assert row["losses"][0] == pytest.approx(rows["mebp in memory"]["losses"][0], rel=1e-4)
    paper = rows["mesp-paper"]
    assert rows["mesp-store-h"]["losses"] == paper["losses"]
    # The losses also agree after an update, so bench.py and the engine use the same settings.
    assert paper["losses"] == pytest.approx(rows["mebp in memory"]["losses"], rel=1e-5)
    assert 0 < paper["baseline_bytes"] < paper["footprint_peak_bytes"]
    for names in (of_mesp, of_mebp, of_mezo):
        for figure, sign in (("written_bytes", 1), ("predicted_peak_bytes", -1)):
            figures = [sign * rows[name][figure] for name in names]
            assert figures == sorted(set(figures))  # more bytes on disk, less memory
    assert all(rows[name]["written_bytes"] == 0 for name in of_engine if "memory" in name)
    assert rows["mebp in memory"]["time_to_mebp"] == rows["mesp in memory"]["peak_to_mesp"] == 1
    assert rows["mebp in memory"]["peak_to_mebp"] == 1
    assert paper["paper_bytes"] is None

    header, _, *lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert {"method", "steps", "peak MB", "predicted peak MB", "time of MeBP"} <= set(cells(header))
    assert "paper MB" not in header  # the paper has no figure for this model
    assert [cells(line)[4] for line in lines[: len(rows)]] == list(rows)


def test_the_products_alone_are_measured_by_threads(model: Path, tmp_path: Path):
    size = ("--model", model, "--seq-len", 16, "--steps", 2)
    methods = ("--methods", "mesp,products,products-recomputed", "--threads", "1,2")
    rows = measured(tmp_path, *size, *methods)
    names = [row["variant"].removesuffix("s") for row in rows]
    assert names[::2] == [f"{m} 1 thread" for m in ("mesp", "products", "products-recomputed")]
    assert [row["threads"] for row in rows] == [1, 2] * 3
    assert all(row["error"] is None and row["seconds"] > 0 for row in rows)
    assert rows[0]["losses"] == pytest.approx(rows[1]["losses"], rel=1e-5)
    # With T tokens, each weight needs 2 T operations in the forward product, and 2 T in the
    # backward product. The first block's q, k and v need no backward product.
    width, inner, vocabulary = TINY["hidden_size"], TINY["intermediate_size"], TINY["vocab_size"]
    qkv, mlp = 2 * width * width, width * inner  # k and v are half as wide as q
    block = qkv + width * width + 3 * mlp
    once = 2 * (3 * block + width * vocabulary) - qkv
    again = 3 * (block - mlp)
    assert rows[2]["tflop"] == pytest.approx(2e-12 * 16 * once)
    assert rows[4]["tflop"] == pytest.approx(2e-12 * 16 * (once + again))


@pytest.mark.slow
def test_generation_is_measured_alone_and_together(model: Path, tmp_path: Path):
    size = ("--model", model, "--seq-len", 8, "--steps", 4)
    rows = measured(tmp_path, "--table", "generation", *size)
    assert [(row["variant"], row["texts"]) for row in rows] == [
        ("mesp", 1), ("mesp", 8), ("mlx-lm", 1)
    ]  # fmt: skip
    for row in rows:
        assert row["prompt_per_second"] > 0 and row["footprint_peak_bytes"] > 0
    assert rows[0]["to_one"] == 1


@pytest.mark.slow
def test_generation_is_measured_with_adapters(model: Path, tmp_path: Path):
    size = ("--model", model, "--seq-len", 8, "--steps", 4)
    rows = measured(tmp_path, "--table", "adapters", *size)
    assert [row["adapters"] for row in rows] == [0, 1, 2, 4]
    sizes = [row["adapter_bytes"] for row in rows]
    assert sizes == [count * sizes[1] for count in (0, 1, 2, 4)] and sizes[1] > 0
    assert rows[0]["to_base"] == 1 and all(row["decoded_per_second"] > 0 for row in rows)


@pytest.mark.slow
def test_weights_of_few_bits_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bits, "GROUPS", tmp_path)
    model = write_model(tmp_path / "tiny", TINY | {"intermediate_size": 1024})
    size = ("--model", model, "--seq-len", 16, "--steps", 1)
    rows = measured(tmp_path, "--table", "bits", *size)
    names = [f"tiny-{each}" for each in ("4bit-64", "3bit-64", "2bit-64", "2bit-128")]
    assert [row["model"] for row in rows[::2]] == [row["model"] for row in rows[1::2]] == names
    mapped = [row["mapped_bytes"] for row in rows[::2]]
    assert mapped == sorted(set(mapped), reverse=True)
    assert all(row["cpu_seconds"] > 0 and row["footprint_peak_bytes"] > 0 for row in rows)
    assert rows[0]["peak_to_first_bits"] == rows[1]["time_to_first_bits"] == 1


@pytest.mark.slow
def test_the_whole_model_is_extrapolated(model: Path, tmp_path: Path):
    size = ("--model", model, "--seq-len", 16, "--layers", "1,2")
    options = ("--methods", "mesp", "--steps", 1, "--plot", tmp_path / "rows.png")
    one, two, whole = measured(tmp_path, *size, *options)
    assert [row["blocks"] for row in (one, two, whole)] == [1, 2, 3]
    assert whole["extrapolated_from"] == [1, 2]
    peaks = [row["footprint_peak_bytes"] for row in (one, two, whole)]
    assert peaks[2] == pytest.approx(2 * peaks[1] - peaks[0])
    assert two["predicted_peak_bytes"] < whole["predicted_peak_bytes"]
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_fails_leaves_the_others(model: Path, tmp_path: Path):
    size = ("--model", model, "--seq-len", 16, "--steps", 1, "--work", tmp_path / "work")
    done = bench(*size, "--methods", "mesp", "--memory-limit", "0.1,auto,bar")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 2
    assert "tiny 16 mesp ≤ 0.1 MB failed: A memory limit" in done.stderr
    assert "tiny 16 mesp bar failed: There is no figure" in done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("| tiny")]
    assert [cells(line)[4] for line in lines] == ["mesp ≤ 0.1 MB", "mesp", "mesp bar"]


@pytest.mark.slow
@on_linux
def test_what_block_functions_bring(tmp_path: Path):
    rows = measured(tmp_path, "--table", "functions", "--model", "demo", "--seq-len", 256)
    assert [row["forward_pass"] for row in rows] == ["functions", "formulas", "dropout", "dora"]
    functions, formulas, *others = rows
    for name in ("modelled_seconds", "evals", "moved_bytes"):
        assert functions[name] < formulas[name] <= min(other[name] for other in others)


@pytest.mark.slow
@on_linux
def test_a_step_on_a_phone_takes_no_more_than_it_did(tmp_path: Path):
    size = ("--model", "demo", "--work", tmp_path, "--json", tmp_path / "rows.json")
    done = succeeded(bench("--table", "gpu", *size))
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["seq_len"] for row in rows] == [256, 1024]
    for row in rows:
        assert (row["model"], row["device"], row["dtype"]) == ("demo", "gpu", "bfloat16")
        assert 0 < row["evals"] <= MOST_EVALS[row["seq_len"]]
        assert row["evals"] < row["kernels"] <= MOST_KERNELS[row["seq_len"]]
        assert row["tflop"] > 0 and row["modelled_seconds"] > 200e-6 * row["evals"]
        # With the trainer's command buffers, `eval` sleeps while it waits. With MLX's, it keeps a
        # core busy.
        assert row["strict_spinning_seconds"] < 0.01 * row["modelled_seconds"]
        assert row["spinning_seconds"] > 0.1 * row["modelled_seconds"]
        assert 0 < row["most_first_kernels"] <= row["first_kernels"] < row["kernels"]
        assert row["strict_ledger_peak_bytes"] <= row["strict_predicted_peak_bytes"]
        # Slower completion handlers keep more command buffers in flight. The plan counts their
        # memory.
        in_flight = [row[f"{rules}_most_in_flight"] for rules in ("fast", "strict", "slow")]
        assert in_flight == sorted(set(in_flight))
        assert row["slow_ledger_peak_bytes"] <= row["slow_predicted_peak_bytes"]
    short, long = rows
    assert short["predicted_peak_bytes"] == pytest.approx(short["ledger_peak_bytes"], rel=0.1)
    assert long["ledger_peak_bytes"] > short["ledger_peak_bytes"]
    header, _, *lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert {"evals", "kernels", "TFLOP", "modelled s"} <= set(cells(header)) and len(lines) == 2
    assert "Counted: evals" in done.stdout and "Modelled: the" in done.stdout
    assert "Measured" not in done.stdout


def test_records_at_their_own_length_are_compared_with_padded_ones(model: Path, tmp_path: Path):
    size = ("--model", model, "--seq-len", "16,64", "--steps", 6)
    padded, short = measured(tmp_path, "--table", "records", *size)
    assert (padded["lengths"], short["lengths"]) == ("64", "16, 64")
    assert padded["to_padded"] == 1
    ratio = short["records_per_second"] / padded["records_per_second"]
    assert short["to_padded"] == pytest.approx(ratio)
    assert short["losses"] == pytest.approx(padded["losses"], rel=1e-6)
    # both plan for the longest sequence
    assert short["predicted_peak_bytes"] == padded["predicted_peak_bytes"]


def test_packed_records_are_compared_with_one_a_step(model: Path, tmp_path: Path):
    size = ("--model", model, "--seq-len", "64,128,512", "--steps", 12)
    alone, packed = measured(tmp_path, "--table", "packing", *size)
    assert (alone["lengths"], packed["lengths"]) == ("64, 128", "packed into 512")
    assert (alone["steps"], packed["steps"]) == (12, 1)
    assert alone["to_alone"] == 1
    assert packed["to_alone"] == packed["records_per_second"] / alone["records_per_second"]


@pytest.mark.slow
@on_linux
def test_packed_records_are_counted_against_one_a_step(model: Path, tmp_path: Path):
    size = ("--model", model, "--seq-len", "64,128,512")
    alone, packed = measured(tmp_path, "--table", "packing-gpu", *size)
    assert (alone["lengths"], packed["lengths"]) == ("64, 128", "packed into 512")
    assert alone["records_per_second"] == pytest.approx(1 / alone["modelled_seconds"])
    assert packed["to_alone"] > 1 == alone["to_alone"]


@pytest.mark.slow
def test_storing_h(model: Path, tmp_path: Path):
    size = ("--model", model, "--seq-len", 8, "--rank", "4,8", "--steps", 3)
    rows = measured(tmp_path, "--table", "h", *size)
    assert [row["h_bytes_of_block"] for row in rows] == [7 * 8 * 4 * 4, 7 * 8 * 8 * 4]
    assert rows[0]["h_bytes"] == 3 * rows[0]["h_bytes_of_block"]
    assert all(row["h_seconds_of_block"] > 0 < row["gradient_seconds_of_block"] for row in rows)


@pytest.mark.slow
def test_quality_of_mezo(model: Path, tmp_path: Path):
    size = ("--model", model, "--seq-len", 16, "--steps", 2)
    rows = measured(tmp_path, "--table", "mezo-quality", *size)
    assert [row["layer"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert abs(row["cosine"]) < 0.2 and 0.4 < row["sign_agreement"] < 0.6
        assert row["relative_error"] > 1


@pytest.fixture
def few_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "VAL_BATCHES", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("few_held_out")
def test_defaults_are_the_first_of_a_sweep(tmp_path: Path):
    size = ("--seq-len", 32, "--steps", 2)
    rows = measured(tmp_path, "--table", "defaults", "--rank", "2,8", *size)
    default, *others = rows
    assert (default["update"], default["optimizer"]) == ("default", "adamw8bit")
    assert default["learning_rate"] == pytest.approx(0.007 / 192**0.5)
    assert len({json.dumps(row) for row in others}) == len(others) >= 8
    assert {row["rank"] for row in rows} == {2, 8}
    assert len({row["before"] for row in rows}) == 1
    drops = [row["before"] - row["after"] for row in rows]
    assert [row["of_best"] for row in rows] == pytest.approx([d / max(drops) for d in drops])
    # A bundle contains its data, so --data is refused.
    options = ("--model", tmp_path / "work" / "demo-data.mesp", "--data", "x.txt")
    assert "--data" in refused(bench("--table", "defaults", *size, *options))


@pytest.mark.slow
def test_objectives_beside_supervised_steps(tmp_path: Path):
    size = ("--model", "demo", "--seq-len", 32, "--steps", 2)
    supervised, *others = measured(tmp_path, "--table", "preferences", *size)
    assert supervised["objective"] == "supervised" and supervised["time_of_supervised"] is None
    variants = ["dpo", "dpo, inputs on disk", "ipo", "simpo", "orpo", "kto"]
    assert [row["variant"] for row in others] == variants
    for row in others:
        assert row["time_of_supervised"] == row["seconds"] / supervised["seconds"]
        assert 0.5 < row["peak_of_supervised"] < 1.5


@pytest.mark.slow
def test_parts_of_the_adapters_take_less(model: Path, tmp_path: Path):
    rows = measured(tmp_path, "--table", "parts", "--model", model, "--seq-len", 16)
    rows = {row["trained"]: row for row in rows}
    predicted = {name: row["predicted_peak_bytes"] for name, row in rows.items()}
    assert predicted["B of q,v"] < predicted["q,v"] < predicted["all"] > predicted["B alone"]
    assert len({row["losses"][0] for row in rows.values()}) == 1, "the initial B is zero"
    assert all(0 < row["backward_seconds"] < row["seconds"] for row in rows.values())


@pytest.mark.slow
@pytest.mark.usefixtures("few_held_out")
def test_convergence(tmp_path: Path):
    size = ("--seq-len", 32, "--steps", 1, "--work", tmp_path, "--json", tmp_path / "losses.json")
    done = succeeded(bench("--table", "convergence", *size, "--plot", tmp_path / "losses.svg"))
    assert "MeSP and MeBP: largest relative difference" in done.stdout
    mesp, mebp, mezo = json.loads((tmp_path / "losses.json").read_text())["rows"]
    assert [row["method"] for row in (mesp, mebp, mezo)] == ["mesp", "mebp", "mezo"]
    assert mesp["losses"] == pytest.approx(mebp["losses"], rel=1e-4)
    assert [step for step, _ in mesp["held_out"]] == [0, 1]
    assert "held-out loss" in (tmp_path / "losses.svg").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("few_held_out", "stores_bfloat16")
def test_convergence_is_of_the_models_own_weights(model: Path, tmp_path: Path):
    text, bundle = tmp_path / "text.txt", tmp_path / "own.mesp"
    text.write_text(TEXT)
    size = ("--seq-len", 32, "--rank", 8)
    call("export", "--model", model, "--data", text, *size, "--out", bundle)
    found = []
    for options in (("--model", model, "--data", text), ("--model", bundle)):
        rows = measured(tmp_path, "--table", "convergence", "--steps", 2, *options, *size)
        found.append([row["losses"] for row in rows])
    # The two exports may sum the moments of the matrices' inputs in different orders, so some codes
    # of the weights differ. With AVX2, the losses differ by 4e-4.
    for first, second in zip(*found, strict=True):
        assert np.ravel(first) == pytest.approx(np.ravel(second), rel=1e-3)
    done = bench("--table", "convergence", "--model", bundle, "--data", text)
    assert "--data are of its export" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("few_held_out")
def test_the_papers_exhibits_are_one_page(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    short = [each._replace(options=each.options | {"steps": 1}) for each in paper_page.EXHIBITS]
    monkeypatch.setattr(paper_page, "EXHIBITS", tuple(short))
    size = ("--model", model, "--seq-len", "16,256", "--rank", "2,4", "--steps", 1)
    done = succeeded(bench("--table", "paper", *size, "--work", tmp_path))
    assert done.stdout.splitlines()[-1] == f"Wrote {tmp_path / 'paper' / 'paper.md'}."
    page = (tmp_path / "paper" / "paper.md").read_text()
    pictures = re.findall(r"^!\[.+\]\((.+)\)$", page, re.M)
    assert pictures == ["length.png", "rank.png", "mezo-quality.png", "convergence.png"]
    assert all((tmp_path / "paper" / name).read_bytes()[:4] == b"\x89PNG" for name in pictures)

    summary, *sections = page.split("\n## ")
    assert [section.splitlines()[0] for section in sections] == [e.title for e in short]
    lines = [cells(line) for line in summary.splitlines() if line.startswith("|")][2:]
    figures = {figure: (theirs, here) for figure, theirs, here in lines}
    peaks = (("MeSP", 16), ("MeSP", 256), ("MeBP", 256))
    assert [name for name in figures if "peak MB" in name] == [
        f"peak MB of {method}, tiny, {length} tokens" for method, length in peaks
    ]
    table = [cells(line) for line in sections[0].splitlines() if line.startswith("|")]
    header, rows = table[0], table[2:]
    column = {name: header.index(name) for name in header}
    mesp, mebp = (
        next(r for r in rows if r[column["seq"]] == "256" and r[column["method"]] == method)
        for method in ("mesp", "mebp")
    )
    peak, time = column["peak MB"], column["time of MeBP"]
    assert figures["peak MB of MeSP, tiny, 256 tokens"] == ("-", mesp[peak])
    assert figures["peak MB of MeBP, tiny, 256 tokens"] == ("-", mebp[peak])
    assert figures["time of a step, MeSP's of MeBP's, tiny, 256 tokens"] == ("-", mesp[time])
    reduction = 100 * (1 - float(mesp[peak]) / float(mebp[peak]))
    said = figures["MeSP's reduction of MeBP's peak, %, tiny, 256 tokens"][1]
    assert float(said) == pytest.approx(reduction, abs=1)
    assert figures["MB that storing h takes, tiny"][0] == "30"
    assert figures["cosine of MeZO's estimate and the gradient"][0] == "0.001"
    theirs, here = figures["largest relative difference of MeSP's and MeBP's losses"]
    assert theirs == "equal" and 0 <= float(here) < 1e-4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--methods", "mesp,sgd"], "no method 'sgd'"),
        (["--memory-limit", "much"], "much is neither a number of MB nor"),
        (["--memory-limit", "mebp", "--methods", "mesp"], "needs mebp among the --methods"),
        (["--methods", "torch-peft"], "torch-peft needs --peft, a Python with torch"),
        (["--seq-len", "0"], "0 is not in the range"),
        (["--table", "h", "--offload", "all"], "--offload has no use in the table h"),
        (["--table", "gpu", "--steps", "2"], "--steps has no use in the table gpu"),
        (["--data", "text.txt"], "--data has no use in the table memory"),
        (["--plot", "peaks.txt"], "must end in .png, .svg or .pdf"),
        (["--table", "paper", "--plot", "peaks.png"], "--plot have no use in the table paper"),
        (["--model", "no-such-model"], "There is no model no-such-model"),
        (["--model", "demo", "--layers", "99"], "fewer than --layers"),
    ],
)
def test_a_bad_option_is_one_sentence(options: list[str], said: str, tmp_path: Path):
    done = bench(*options, "--work", tmp_path)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]
    assert done.stdout == "" and "Traceback" not in done.stderr
