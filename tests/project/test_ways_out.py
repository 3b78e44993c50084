import re

from helpers.paths import ROOT

TRAINER = ROOT / "ios" / "MeSPTrainer"
WAYS = "Bundle/MLXErrors.swift"


def sources() -> dict[str, str]:
    return {
        str(path.relative_to(TRAINER)): path.read_text(encoding="utf-8")
        for path in TRAINER.rglob("*.swift")
        if not {"Tests", "UITests"} & set(path.parts)
    }


def test_values_leave_mlx_only_where_errors_are_checked():
    found = {
        path for path, text in sources().items() if re.search(r"\.(item|asArray|asData)\(", text)
    }
    assert found == {WAYS}


def test_arrays_are_made_only_where_they_keep_their_shape_without_memory():
    calls = {
        call
        for path, text in sources().items()
        if path != WAYS
        for call in re.findall(
            r"(?<![\w.])MLXArray\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)", text
        )
    }
    numbers = {"$0", "0 as Float", "-Float.infinity", "Float(0)", "Float(1)", "eps", "least"}
    numbers |= {"block.scale", "loss", "expectedLoss", "isIt * a", "isIt * (1 - a)"}
    mapped = {"rawPointer: data, shape, dtype: dtype"}  # checked in mapArray
    assert calls == numbers | mapped
