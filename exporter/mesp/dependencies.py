"""Imports mlx-lm, which fails where the system allows fewer open files than mlx-lm sets."""

from __future__ import annotations

import resource

from mesp.errors import MespError

OPEN_FILES = 2048  # mlx-lm's number, for models of many files

_allowed, _most = resource.getrlimit(resource.RLIMIT_NOFILE)
_set = resource.setrlimit
resource.setrlimit = lambda *_: None
try:
    import mlx_lm
    import mlx_lm.models.switch_layers
    import mlx_lm.tuner.lora
except Exception as error:
    raise MespError(
        f"mlx-lm cannot be imported ({str(error).partition(chr(10))[0]}); install this package "
        "again, with its dependencies."
    ) from error
finally:
    resource.setrlimit = _set
if _allowed != resource.RLIM_INFINITY and _allowed < OPEN_FILES:
    wanted = OPEN_FILES if _most == resource.RLIM_INFINITY else min(OPEN_FILES, _most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, _most))

__all__ = ["mlx_lm"]
