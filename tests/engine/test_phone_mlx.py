"""The MLX of phones, in an environment of its own: it computes what this environment's does.

The engine, built against it, trains as it does with today's.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import mesp
from helpers.models import FAMILIES, write_model
from helpers.paths import DEMO_BUNDLE, PHONE_MLX, ROOT
from mesp.block_function import mlxfn


@pytest.mark.skipif(not PHONE_MLX.exists(), reason="`make test` installs the MLX of phones")
def test_one_export_computes_the_same_on_a_phones_mlx(tmp_path: Path):
    """Each family's block functions, and operations: to the last bit."""
    bundles = [DEMO_BUNDLE]
    for name, config in FAMILIES.items():
        source, out = write_model(tmp_path / name, config), tmp_path / f"{name}.mesp"
        mesp.export(source, out=out, seq_len=24, group_size=32, rank=4, device="cpu")
        bundles.append(out)
    command = [sys.executable, ROOT / "tools" / "compare_mlx.py", PHONE_MLX, *bundles]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"MLX {mlxfn.LAYOUTS[0]}\n" in done.stdout


@pytest.mark.phone
def test_twenty_steps_are_the_same():
    """The losses and the adapters, to the last bit."""
    tool = ROOT / "tools" / "compare_mlx.py"
    command = [sys.executable, tool, PHONE_MLX, DEMO_BUNDLE, "--steps", 20]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
