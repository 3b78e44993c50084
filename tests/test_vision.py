import json
import os
import shutil
import struct
import sys
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed: pip install 'mesp[vision]'")

from mlx.utils import tree_flatten
from mlx_vlm import utils
from PIL import Image
from tokenizers import Tokenizer, decoders

from helpers import vision_models
from helpers.vision_models import HIDDEN, SEQUENCE, picture, write_vision_model
from mesp.errors import MespError
from mesp.vision import ImageFeatures, VisionTower

SIZES = [(20, 24), (100, 60), (40, 300)]
families = pytest.mark.parametrize("family", vision_models.FAMILIES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision")
    return {name: write_vision_model(root / name, name) for name in vision_models.FAMILIES}


@pytest.fixture(scope="module")
def towers(folders: dict[str, Path]) -> dict[str, VisionTower]:
    return {name: VisionTower.open(folder) for name, folder in folders.items()}


def _whole(folder: Path) -> tuple[Any, Any]:
    return utils.load(str(folder), trust_remote_code=False)


def _inputs(processor: Any, prompt: str, *images: bytes) -> dict[str, Any]:
    decoded = [utils.load_image(BytesIO(image)) for image in images]
    return utils.prepare_inputs(processor, images=decoded, prompts=prompt)


def _rows(model: Any, inputs: dict[str, Any]) -> mx.array:
    """Returns what mlx-vlm puts at the places of image tokens: [n, hidden]."""
    tokens = inputs["input_ids"][0].tolist()
    places = [i for i, token in enumerate(tokens) if token == model.config.image_token_index]
    return model.get_input_embeddings(**inputs).inputs_embeds[0][mx.array(places)]


def _assert_rows_in_bfloat16(folder: Path) -> None:
    model, processor = _whole(folder)
    image = picture(70, 50)
    rows = VisionTower.open(folder).features(image).rows
    assert rows.dtype == mx.bfloat16
    assert mx.array_equal(rows, _rows(model, _inputs(processor, "<image>", image)))


def _equal(one: ImageFeatures, other: ImageFeatures) -> bool:
    return one.text == other.text and mx.array_equal(one.rows, other.rows).item()


@families
@pytest.mark.parametrize("size", SIZES)
def test_rows_are_those_of_mlx_vlm(
    folders: dict[str, Path], towers: dict[str, VisionTower], family: str, size: tuple[int, int]
):
    model, processor = _whole(folders[family])
    image = picture(*size)
    features = towers[family].features(image)
    inputs = _inputs(processor, "The <image> dog", image)
    assert mx.array_equal(features.rows, _rows(model, inputs))
    assert features.rows.shape == (features.text.count("<image>"), HIDDEN)
    assert mx.std(features.rows).item() > 0.1


@families
def test_rows_are_in_the_dtype_of_the_model(tmp_path: Path, family: str):
    folder = write_vision_model(tmp_path / "model", family, dtype=mx.bfloat16)
    _assert_rows_in_bfloat16(folder)


@families
def test_reads_a_quantized_model_in_the_form_of_mlx(
    folders: dict[str, Path], tmp_path: Path, family: str
):
    folder = _edit(folders[family], tmp_path / "model", quantization={"group_size": 32, "bits": 4})
    model, _ = _whole(folders[family])
    model.set_dtype(mx.bfloat16)
    nn.quantize(model.language_model, group_size=32, bits=4)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    _assert_rows_in_bfloat16(folder)


@families
def test_texts_join_to_a_prompt_with_two_images(
    folders: dict[str, Path], towers: dict[str, VisionTower], family: str
):
    model, processor = _whole(folders[family])
    tower = towers[family]
    messages = [
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": " The fox?"}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "A dog"}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "And\n"}, {"type": "image"}],
        },
    ]
    prompt = processor.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    images = [picture(100, 60, seed=1), picture(31, 40, seed=2)]
    inputs = _inputs(processor, prompt, *images)
    both = [tower.features(image) for image in images]
    before, between, after = prompt.split(tower.image_token)
    joined = before + both[0].text + between + both[1].text + after
    # Both families' processors add no special tokens: the template has them.
    tokens = processor.tokenizer.encode(joined, add_special_tokens=False)
    assert tokens == inputs["input_ids"][0].tolist()
    rows = mx.concatenate([each.rows for each in both])
    assert mx.allclose(rows, _rows(model, inputs), rtol=1e-4, atol=1e-4)


def test_an_image_is_cut_as_in_transformers(towers: dict[str, VisionTower]):
    tile = "<image>" * SEQUENCE
    rows = [
        "".join(
            f"<fake_token_around_image><row_{row}_col_{column}>{tile}" for column in range(1, 5)
        )
        for row in range(1, 4)
    ]
    end = f"\n<fake_token_around_image><global-img>{tile}<fake_token_around_image>"
    expected = "".join(f"{row}\n" for row in rows) + end
    assert towers["smolvlm"].features(picture(100, 60)).text == expected
    assert towers["idefics3"].features(picture(100, 60)).text == expected
    tiles = "".join(
        f"<|img_row_{row}_col_{column}|>{tile}" for row in (1, 2) for column in (1, 2, 3)
    )
    # The thumbnail of 48 x 32 pixels has 6 x 4 patches, which are merged by 2 x 2.
    thumbnail = "<|img_thumbnail|>" + 6 * "<image>"
    expected = f"<|image_start|>{tiles}{thumbnail}<|image_end|>"
    assert towers["lfm2_vl"].features(picture(100, 60)).text == expected
    # An image of 20 x 24 pixels is enlarged to 32 x 48.
    small = f"<|image_start|>{6 * '<image>'}<|image_end|>"
    assert towers["lfm2_vl"].features(picture(20, 24)).text == small


@families
def test_equal_bytes_are_read_once(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
):
    tower = VisionTower.open(folders[family])
    kind = type(tower._model)
    calls = []
    compute = kind.get_input_embeddings
    monkeypatch.setattr(
        kind, "get_input_embeddings", lambda *a, **b: calls.append(1) or compute(*a, **b)
    )
    image = picture(20, 20)
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(image)
    read = [tower.features(each) for each in (image, tmp_path / "a.png", tmp_path / "b.png")]
    assert len(calls) == 1
    assert read[0] is read[1] is read[2]
    assert not _equal(tower.features(picture(20, 20, seed=1)), read[0])
    assert len(calls) == 2


@families
def test_the_text_model_is_not_in_memory(
    folders: dict[str, Path], towers: dict[str, VisionTower], family: str
):
    names = [name for name, _ in tree_flatten(towers[family]._model.parameters())]
    assert {name.partition(".")[0] for name in names} == {
        *(("vision_tower", "multi_modal_projector") if family == "lfm2_vl" else ()),
        *(("vision_model", "connector") if family != "lfm2_vl" else ()),
    }
    tokens = json.loads((folders[family] / "config.json").read_text())["image_token_id"]
    assert (towers[family].image_token, towers[family].image_token_id) == ("<image>", tokens)


@families
@pytest.mark.parametrize("size", [(1, 1), (3, 3), (1, 7), (7, 1), (3, 20), (90, 15)])
def test_small_and_narrow_images(
    towers: dict[str, VisionTower], family: str, size: tuple[int, int]
):
    features = towers[family].features(picture(*size))
    assert len(features.rows) == features.text.count("<image>")
    assert mx.isfinite(features.rows).all()
    if family != "lfm2_vl":  # the tiny one has too few patches for narrower images
        assert len(towers[family].features(picture(size[0], 190 * size[0])).rows)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "CMYK"])
def test_modes_of_pixels(towers: dict[str, VisionTower], mode: str):
    file = BytesIO()
    gray = Image.open(BytesIO(picture(30, 20))).convert("L")
    image = gray.convert("I").convert(mode) if mode == "I;16" else gray.convert(mode)
    image.save(file, "TIFF")
    decoded = BytesIO()
    image.convert("RGB").save(decoded, "PNG")
    tower = towers["lfm2_vl"]
    assert _equal(tower.features(file.getvalue()), tower.features(decoded.getvalue()))


def test_orientation_is_applied(towers: dict[str, VisionTower]):
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 270 degrees
    turned = BytesIO()
    Image.open(BytesIO(picture(90, 30))).transpose(Image.Transpose.ROTATE_270).save(turned, "PNG")
    tower = towers["lfm2_vl"]
    one = tower.features(picture(90, 30, exif=exif))
    assert _equal(one, tower.features(turned.getvalue()))
    assert not _equal(one, tower.features(picture(90, 30)))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF", "MPO"])
def test_the_first_frame_is_read(towers: dict[str, VisionTower], kind: str):
    frames = [Image.open(BytesIO(picture(30, 20, seed=seed))) for seed in (0, 1, 2)]
    moving, still = BytesIO(), BytesIO()
    lossless = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(moving, kind, save_all=True, append_images=frames[1:], **lossless)
    assert Image.open(moving).n_frames == 3
    Image.open(moving).convert("RGB").save(still, "PNG")
    tower = towers["lfm2_vl"]
    assert _equal(tower.features(moving.getvalue()), tower.features(still.getvalue()))


def _header(width: int, height: int) -> bytes:
    """Returns a PNG file whose pixels are missing."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    ) + b"\0\0\0\0IDAT5\xaf\x06\x1e"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no image in one of the formats BMP, GIF, JPEG, PNG, TIFF, WEBP"),
        (b"GIF89a", "no image in one of the formats"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "no image in one"),
        (picture(60, 60)[:2000], "Cannot decode the image: "),
        (_header(9, 9), "Cannot decode the image: "),
        (_header(8000, 7000), "more than 50 megapixels"),
        (_header(60000, 60000), "more than 50 megapixels"),
        (_header(2001, 10), "one side is over 200 times as long"),
        (bytes((20 << 20) + 1), "more than 20 MiB"),
    ],
    ids=["empty", "gif", "eps", "cut", "no-pixels", "large", "bomb", "narrow", "long"],
)
def test_refuses_what_is_no_image(
    towers: dict[str, VisionTower],
    recwarn: pytest.WarningsRecorder,
    tmp_path: Path,
    data: bytes,
    message: str,
):
    with pytest.raises(MespError, match=message):
        towers["lfm2_vl"].features(data)
    file = tmp_path / "a.png"
    file.write_bytes(data)
    with pytest.raises(MespError) as error:
        towers["lfm2_vl"].features(file)
    assert message.replace("the image", str(file)) in str(error.value)
    assert str(file) in str(error.value)
    assert not recwarn.list


def test_refuses_a_path_that_is_no_file(towers: dict[str, VisionTower], tmp_path: Path):
    with pytest.raises(MespError, match=r"a\.png: No such file or directory"):
        towers["lfm2_vl"].features(tmp_path / "a.png")
    with pytest.raises(MespError, match="Is a directory"):
        towers["lfm2_vl"].features(tmp_path)
    os.mkfifo(tmp_path / "b.png")
    with pytest.raises(MespError, match=r"b\.png is not a regular file"):
        towers["lfm2_vl"].features(tmp_path / "b.png")


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("qwen2_5_vl", "of type qwen2_5_vl would need positions of rows and columns"),
        ("qwen3_5", "M-RoPE"),
        ("gemma3", "attention in both directions within an image"),
        ("llama", "parts that are not known. Only models of the types idefics3, lfm2_vl, smolvlm"),
        (None, "not known"),
    ],
)
def test_refuses_other_models(tmp_path: Path, model_type: str | None, message: str):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(MespError, match=message):
        VisionTower.open(tmp_path)


def _edit(folder: Path, copy: Path, **values: Any) -> Path:
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | values))
    return copy


def test_runs_no_code_of_the_model(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    code = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    own = _edit(folders["smolvlm"], tmp_path / "own", model_file="model.py")
    (own / "model.py").write_text(code)
    with pytest.raises(MespError, match="its own Python file"):
        VisionTower.open(own)
    decision = {"AutoModel": "modeling.D1Model"}
    other = _edit(folders["lfm2_vl"], tmp_path / "other", auto_map=decision)
    with pytest.raises(MespError, match="of type d1"):
        VisionTower.open(other)
    for family in vision_models.FAMILIES:
        remote = _edit(folders[family], tmp_path / family, auto_map={"AutoProcessor": "code.P"})
        (remote / "code.py").write_text(code)
        for name, key in (
            ("tokenizer_config", "AutoTokenizer"),
            ("preprocessor_config", "AutoImageProcessor"),
            ("processor_config", "AutoProcessor"),
        ):
            settings = json.loads((remote / f"{name}.json").read_text())
            settings["auto_map"] = {key: ["code.P", None] if key == "AutoTokenizer" else "code.P"}
            (remote / f"{name}.json").write_text(json.dumps(settings))
        monkeypatch.setattr("builtins.input", lambda *_: "y")
        VisionTower.open(remote)
    assert not (tmp_path / "ran").exists()


def test_refuses_damaged_models(folders: dict[str, Path], tmp_path: Path):
    with pytest.raises(MespError, match=r"has no config\.json that is"):
        VisionTower.open(tmp_path)
    folder = _edit(folders["smolvlm"], tmp_path / "one", image_token_id=9)
    with pytest.raises(MespError, match=r"The image token is 9 in config\.json"):
        VisionTower.open(folder)
    weights = mx.load(str(folder / "model.safetensors"))
    del weights["model.vision_model.post_layernorm.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(MespError, match=r"Cannot open the vision tower of .*: Missing"):
        VisionTower.open(folder)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink()
    with pytest.raises(MespError, match=r"lacks preprocessor_config\.json or processor_config"):
        VisionTower.open(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(MespError, match="that is a JSON object"):
        VisionTower.open(folder)


def test_refuses_a_text_that_does_not_encode_back(folders: dict[str, Path], tmp_path: Path):
    folder = _edit(folders["smolvlm"], tmp_path / "model")
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("\n", " ")])
    tokenizer.save(file)
    with pytest.raises(MespError, match="does not encode back to these tokens"):
        VisionTower.open(folder).features(picture(100, 60))


def test_names_the_missing_package(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    with pytest.raises(MespError, match=r"needs mlx-vlm .*: pip install 'mesp\[vision\]'"):
        VisionTower.open(folders["smolvlm"])
