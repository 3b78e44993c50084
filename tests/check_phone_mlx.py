"""The engine, built against the MLX of phones, trains as it does with today's: `make test-slow`."""

import subprocess
import sys

from test_phone_mlx import DEMO, PHONE_MLX, ROOT


def test_twenty_steps_are_the_same():
    """The losses and the adapters, to the last bit."""
    command = [sys.executable, ROOT / "tools" / "compare_mlx.py", PHONE_MLX, DEMO, "--steps", 20]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
