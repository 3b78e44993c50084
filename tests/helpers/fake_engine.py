#!/usr/bin/env python3
"""- `slow`: a step takes 20 ms.
- `deaf`: a step takes 20 ms, and signals do not stop the run.
- `refuse`: the engine fails before it writes a log.
- `fail`: the run fails after three steps.
- `crash`: the engine crashes after three steps.
- `noisy`: the engine prints a line that is not JSON, and a warning.
- `kept`: the plan has 6 kept blocks.

A training run appends the name of each SIGINT and SIGTERM to OUTPUT/signals. `generate` and
`evaluate` append their settings to the file FAKE_ENGINE_NOTES.
"""

import json
import os
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

if sys.argv[1] == "--version":
    sys.exit(print("mesp-engine 0.1.0 with MLX 0.32.4"))
how = os.environ.get("FAKE_ENGINE", "")
if sys.argv[1] in ("generate", "evaluate"):
    settings = json.loads(Path(sys.argv[2]).read_text())
    with open(os.environ["FAKE_ENGINE_NOTES"], "a") as notes:
        print(json.dumps(settings), file=notes)
    if sys.argv[1] == "generate":
        end = {"reason": "stop", "tokens": 0, "prompt_seconds": 1, "seconds": 1}
        sys.exit(print(json.dumps({"type": "end", **end, "footprint_peak_bytes": 1})))
    gained, requests = sum(each["weight"] for each in settings["adapters"]), 0
    for line in sys.stdin:
        loss = len(json.loads(line)["tokens"]) - 1
        print(json.dumps({"type": "text", "log_likelihood": gained - loss, "kl": 0}), flush=True)
        requests += 1
    sys.exit(print(json.dumps({"type": "end", "requests": requests})))
settings = json.loads(Path(sys.argv[1]).read_text())
if settings.get("dry_run"):
    bundle = Path(settings["bundle"])
    manifest = json.loads((bundle / "manifest.json").read_text())
    sizes = {file["path"]: file["size"] for file in manifest["files"]}
    assert all((bundle / path).stat().st_size == size for path, size in sizes.items())
    length = str(settings["seq_len"])
    functions = {
        group["functions"][length] for group in manifest["blocks"] if length in group["functions"]
    }
    weights = [path for path in sizes if path.startswith(("blocks/", "embedding.", "head."))]
    peak = 1000 * (sum(sizes[path] for path in functions) + settings["seq_len"])
    peak += sum(sizes[path] for path in weights)
    print(json.dumps({"type": "plan", "predicted_peak_bytes": peak, "least_peak_bytes": peak // 2}))
    sys.exit()
output = Path(settings["output"])
stopped = False


def note_signal(number, _frame):
    global stopped
    with (output / "signals").open("a") as file:
        file.write(signal.Signals(number).name + "\n")
    stopped = how != "deaf"


def fail(sentence):
    print(sentence, file=sys.stderr)
    sys.exit(2)


for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note_signal)
if how == "refuse":
    fail("blocks/00.bin is damaged; write the bundle again.")
resume = settings["resume"]
if resume and not (output / "state").exists():
    fail("The run was not saved.")
if (output / "metrics.jsonl").exists() and not resume:
    fail("The output folder already holds a run.")
saved = json.loads((output / "state").read_text()) if resume else {"step": 0, "log_bytes": 0}
log = (output / "metrics.jsonl").open("a")
log.truncate(saved["log_bytes"])


def write(kind, **fields):
    line = json.dumps({"type": kind, "time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", **fields})
    print(line, file=log, flush=True)
    print(line, flush=True)


def save(step):
    state = {"step": step, "log_bytes": (output / "metrics.jsonl").stat().st_size}
    (output / "state").write_text(json.dumps(state))
    (output / "adapters").mkdir(exist_ok=True)
    (output / "adapters" / "adapters.safetensors").write_bytes(b"weights")
    (output / "adapters" / "adapter_config.json").write_text("{}")


def evaluate(step, loss, split="valid"):
    tokens = settings["val_batches"] * settings["seq_len"]
    write("eval", step=step, loss=loss, tokens=tokens, split=split)


def end(reason, step):
    write("end", reason=reason, step=step, seconds=0.5 * step, footprint_peak_bytes=45_600_000)


FIGURES = {"seconds": 0.5, "forward_seconds": 0.1, "loss_seconds": 0.1, "backward_seconds": 0.3}
FIGURES |= {"footprint_bytes": 30_000_000, "footprint_peak_bytes": 45_000_000}
FIGURES |= {"mlx_active_bytes": 1, "mlx_peak_bytes": 2, "mlx_cache_bytes": 3}
FIGURES |= {"grad_norm": None, "thermal_state": "nominal"}
model = {"name": "demo", "id": "mesp/demo", "layers": 4}
if resume:
    write("event", event="resumed", message=f"after step {saved['step']}")
else:
    machine = {"version": "0", "mlx_version": "0.32.4", "device": "cpu", "host": "test"}
    write("start", **machine, model=model, settings=settings)
    kept = {"kept_blocks": 6} if how == "kept" else {}
    write("plan", predicted_peak_bytes=45_200_000, least_peak_bytes=40_000_000, **kept)
    evaluate(0, 4.5)
if how == "noisy":
    print("a library says hello", flush=True)
    print("The bundle was exported for the CPU.", file=sys.stderr)
step = saved["step"]
while step < settings["steps"] and not stopped:
    if how in ("slow", "deaf"):
        time.sleep(0.02)
    step += 1
    tokens = {"tokens": settings["seq_len"] // 4, "input_tokens": settings["seq_len"]}
    loss, rate = 4.0 - 0.01 * step, settings["learning_rate"]
    write("step", step=step, loss=loss, **tokens, learning_rate=rate, **FIGURES)
    if settings["save_every"] and step % settings["save_every"] == 0:
        save(step)
    if step == 3 and how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if step == 3 and how == "fail":
        end("failed", step)
        fail("There is no space left on the disk.")
save(step)
if not stopped:
    evaluate(step, 3.8)
    if settings["eval_every"]:
        (output / "best").mkdir()
    if settings["test"]:
        evaluate(step, 3.9, "test")
end("stopped" if stopped else "finished", step)
