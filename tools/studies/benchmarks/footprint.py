"""Measures this process's memory and reports, with the standard library only."""

import ctypes
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

SAMPLED_EVERY = 0.002  # seconds between two samples


def report(kind: str, **fields: Any) -> None:
    print(json.dumps({"type": kind, **fields}), file=sys.__stdout__, flush=True)


def footprint() -> int:
    """Returns this process's memory in bytes: RssAnon + VmSwap, or phys_footprint on a Mac."""
    if sys.platform == "darwin":
        usage = (ctypes.c_uint64 * 64)()  # rusage_info_v0: a UUID, then 64-bit counters
        ctypes.CDLL("libproc.dylib").proc_pid_rusage(os.getpid(), 0, usage)
        return usage[9]
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    counted = (line for line in lines if line.startswith(("RssAnon:", "VmSwap:")))
    return sum(int(line.split()[1]) * 1024 for line in counted)


class Peak:
    """The highest footprint since this object's creation, in bytes.

    A thread samples the footprint every SAMPLED_EVERY seconds.
    """

    def __init__(self) -> None:
        self.bytes = footprint()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.bytes = max(self.bytes, footprint())
            time.sleep(SAMPLED_EVERY)
