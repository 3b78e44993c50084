import os
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from click.testing import CliRunner, Result

from helpers.paths import FAKE_ENGINE
from mesp.commands.export import main
from mesp.engine.build import CHECKOUT, built_program
from mesp.models.architecture import Architecture
from mesp.models.short_names import KNOWN, geometries

PUBLISHED = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-0.6B": 751_632_384 - 151_936 * 1024,
    "Qwen3-1.7B": 2_031_739_904 - 151_936 * 2048,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3.5-0.8B": 752_393_024,
    "Qwen3.5-2B": 1_881_825_088,
    "Qwen3.5-4B": 4_205_751_296,
    "Qwen3.5-35B-A3B": 34_660_610_688,
    "LFM2-350M": 354_483_968,
    "LFM2.5-350M": 354_483_968,
    "LFM2-700M": 742_489_344,
    "LFM2-1.2B": 1_170_340_608,
    "LFM2.5-1.2B": 1_170_340_608,
    "LFM2-8B-A1B": 8_467_856_832 - (128_000 - 65_536) * 2048,
    "LFM2.5-8B-A1B": 8_467_856_832,  # from its GGUF file's metadata
    "LFM3-1.7B": 1_728_801_536,
    "Granite-4.0-H-Tiny": 6_939_037_248,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
    "SmolLM3-3B": 3_075_098_624,
    "Gemma-3-270m": 268_098_176,
    "Gemma-3-1B": 999_885_952,
    "Gemma-3-4B": 3_880_263_168,
    "Gemma-4-E2B": 4_628_569_379,
    "Gemma-4-E4B": 7_463_013_418,
    "Gemma-2-2B": 2_614_341_888,
    "Gemma-2-9B": 9_241_705_984,
    "Granite-3.3-2B": 2_533_539_840,
    "Granite-3.3-8B": 8_170_864_640,
    "Granite-4.0-H-350M": 340_332_224,
    "Granite-4.0-H-1B": 1_461_538_368,
    "Phi-3-mini-4k-instruct": 3_821_079_552,
    "Phi-4-mini-instruct": 3_836_021_760,
    "Phi-4": 14_659_507_200,
    "Ministral-3-3B": 3_429_006_336,
    "Ministral-3-8B": 8_489_553_920,
    "Mistral-7B-v0.3": 7_248_023_552,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_a_model_has_the_published_number_of_parameters(name, parameters):
    assert Architecture.from_config(KNOWN[name][2]).num_parameters == parameters


def test_a_variant_for_chats_has_the_geometry_of_its_model():
    for name, (_, _, config) in KNOWN.items():
        base = name.replace("-Instruct", "").removesuffix("-it").removesuffix("-Base")
        assert base in PUBLISHED
        assert config is KNOWN[base][2]


def listed(*options: object) -> Result:
    result = CliRunner().invoke(main, ["--list-models", *map(str, options)])
    assert result.exit_code == 0, result.output
    return result


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_without_an_engine_the_list_has_no_peaks(monkeypatch):
    monkeypatch.setenv("MESP_ENGINE", "nowhere")
    result = listed()
    heading, *models = rows(result.stdout)
    assert heading[0] == "model" and len(models) == len(geometries())
    assert models[0] == ["Qwen2.5-0.5B, -Instruct", "494 M", "343.3", "apache-2.0", "-", "-"]
    assert models[-1][0] == "Mistral-7B-v0.3, Mistral-7B-Instruct-v0.3"
    assert all(model[4:] == ["-", "-"] for model in models)
    assert result.stderr.count("\n") == 1 and "`make engine`" in result.stderr


@pytest.mark.slow
def test_the_list_plans_what_an_export_would(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESP_ENGINE", str(FAKE_ENGINE))
    of_three = [["Qwen3-0.6B"], ["LFM2-8B-A1B"], ["SmolLM2-135M"]]
    monkeypatch.setattr("mesp.commands.models.geometries", lambda: of_three)
    result = listed()
    assert result.stderr == ""
    peaks = {name.split(",")[0]: found for name, _, _, _, *found in rows(result.stdout)[1:]}
    assert len(peaks) == 3
    assert all(0 < number(short) < number(long) for short, long in peaks.values())

    size = ["--model", "SmolLM2-135M", "--random-weights", "--seq-len", "256,1024"]
    exported = CliRunner().invoke(main, size)
    short, long = peaks["SmolLM2-135M"]
    assert f"256 tokens {short} MB" in exported.stdout
    assert f"1024 tokens {long} MB" in exported.stdout


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_what_cannot_be_planned_is_said(monkeypatch):
    monkeypatch.setenv("MESP_ENGINE", shutil.which("false"))
    monkeypatch.setattr("mesp.commands.models.geometries", lambda: [["Qwen3-0.6B"]])
    result = listed()
    assert rows(result.stdout)[1] == ["Qwen3-0.6B", "596 M", "411.9", "apache-2.0", "-", "-"]
    assert result.stderr == "Qwen3-0.6B: mesp-engine failed with exit status 1.\n"


@pytest.mark.slow
@pytest.mark.skipif(mx.metal.is_available(), reason="the documented list is of a CPU")
@pytest.mark.usefixtures("stores_bfloat16")
def test_the_documents_have_the_list(monkeypatch):
    # the peaks in docs/models.md are with one thread
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    page = (CHECKOUT / "docs" / "models.md").read_text(encoding="utf-8")
    table = page.partition("<!-- models -->")[2].partition("<!-- /models -->")[0]
    engine = Path(os.environ.get("MESP_ENGINE") or built_program(CHECKOUT))
    compared = slice(None if engine.exists() else 4)
    listing = rows(listed().stdout)
    assert [row[compared] for row in rows(table)] == [row[compared] for row in listing]
