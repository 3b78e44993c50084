import json
from datetime import UTC, datetime, timedelta
from pathlib import Path


def write_run(
    folder: Path,
    steps: int = 4,
    end: str | None = "finished",
    seed: int = 0,
    ago: timedelta = timedelta(0),
) -> Path:
    time = f"{datetime.now(UTC) - ago:%Y-%m-%dT%H:%M:%SZ}"
    settings = {"method": "mesp", "seq_len": 256, "rank": 8, "seed": seed}
    start = {"type": "start", "model": {"name": "Qwen2.5-0.5B"}, "settings": settings}
    records = [{**start, "time": "2026-01-01T00:00:00Z"}]
    records.append({"type": "eval", "time": time, "step": 0, "loss": 4.51, "tokens": 256})
    memory = {"footprint_bytes": 40_000_000, "footprint_peak_bytes": 50_000_000}
    for step in range(1, steps + 1):
        figures = {"step": step, "loss": 4.1 - 0.1 * step, "seconds": 0.5, "tokens": 64}
        figures["input_tokens"] = 256
        records.append({"type": "step", "time": time, **figures, **memory})
    if end:
        records.append({"type": "eval", "time": time, "step": steps, "loss": 3.77, "tokens": 256})
        peak = {"footprint_peak_bytes": 61_200_000}
        records.append(
            {"type": "end", "time": time, "reason": end, "step": steps, "seconds": 3, **peak}
        )
    (folder / "adapters").mkdir(parents=True, exist_ok=True)
    (folder / "adapters" / "adapters.safetensors").write_text(f"weights after {steps} steps")
    (folder / "activations.bin").write_text("what the trainer spilled, of no use elsewhere")
    (folder / "secret.key").write_text("what the noise of a private run can be subtracted with")
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(text)
    return folder
