from statistics import mean
from typing import Any

from studies.benchmarks.cells import Row

# The columns of all tables: for each heading, the key of a row's value and the value's format.
# Bytes are shown in MB.
COLUMNS = {
    "model": ("model", "{}"),
    "blocks": ("blocks", "{}"),
    "from blocks": ("extrapolated_from", "{}"),
    "seq": ("seq_len", "{:,}"),
    "rank": ("rank", "{}"),
    "method": ("variant", "{}"),
    "adapters": ("adapters", "{}"),
    "texts": ("texts", "{}"),
    "prompt tokens/s": ("prompt_per_second", "{:,.0f}"),
    "decoded tokens/s": ("decoded_per_second", "{:,.1f}"),
    "of one": ("to_one", "{:.2f}"),
    "of none": ("to_base", "{:.2f}"),
    "CPU s a prompt token": ("prompt_cpu_seconds", "{:.5f}"),
    "CPU s a decoded token": ("decoded_cpu_seconds", "{:.5f}"),
    "lengths": ("lengths", "{}"),
    "trained": ("trained", "{}"),
    "steps": ("steps", "{}"),
    "records/s": ("records_per_second", "{:,.2f}"),
    "of padded": ("to_padded", "{:.2f}"),
    "of one a step": ("to_alone", "{:.2f}"),
    "BLAS": ("blas", "{}"),
    "threads": ("threads", "{}"),
    "offload": ("offload", "{}"),
    "kept": ("kept_blocks", "{}"),
    "s/step": ("seconds", "{:,.2f}"),
    "CPU s/step": ("cpu_seconds", "{:,.2f}"),
    "backward s": ("backward_seconds", "{:,.2f}"),
    "peak MB": ("footprint_peak_bytes", "{:,.1f}"),
    "growth MB": ("growth_bytes", "{:,.1f}"),
    "net MB": ("net_bytes", "{:,.1f}"),
    "MLX MB": ("mlx_peak_bytes", "{:,.1f}"),
    "forward pass": ("forward_pass", "{}"),
    "evals": ("evals", "{:,}"),
    "kernels": ("kernels", "{:,}"),
    "TFLOP": ("tflop", "{:,.3f}"),
    "ledger peak MB": ("ledger_peak_bytes", "{:,.1f}"),
    "predicted peak MB": ("predicted_peak_bytes", "{:,.1f}"),
    "polling s": ("spinning_seconds", "{:,.2f}"),
    "fast peak MB": ("fast_ledger_peak_bytes", "{:,.1f}"),
    "strict peak MB": ("strict_ledger_peak_bytes", "{:,.1f}"),
    "strict predicted MB": ("strict_predicted_peak_bytes", "{:,.1f}"),
    "strict polling s": ("strict_spinning_seconds", "{:,.3f}"),
    "slow peak MB": ("slow_ledger_peak_bytes", "{:,.1f}"),
    "moved MB": ("moved_bytes", "{:,.0f}"),
    "modelled s": ("modelled_seconds", "{:,.2f}"),
    "new MB": ("new_buffer_bytes", "{:,.0f}"),
    "beyond none MB": ("beyond_base_bytes", "{:,.1f}"),
    "predicted adapters MB": ("adapter_bytes", "{:,.1f}"),
    "error": ("prediction_error", "{:+.0%}"),
    "mapped MB": ("mapped_bytes", "{:,.1f}"),
    "read MB": ("read_bytes", "{:,.1f}"),
    "written MB": ("written_bytes", "{:,.1f}"),
    "paper MB": ("paper_bytes", "{:,.1f}"),
    "of paper": ("peak_to_paper", "{:.2f}"),
    "of first rank": ("peak_to_first_rank", "{:.2f}"),
    "of MeSP": ("peak_to_mesp", "{:.2f}"),
    "peak of MeBP": ("peak_to_mebp", "{:.2f}"),
    "time of MeBP": ("time_to_mebp", "{:.2f}"),
    "time of supervised": ("time_of_supervised", "{:.2f}"),
    "first": ("reference_time", "{:.2f}"),
    "peak of 4 bits": ("peak_to_first_bits", "{:.3f}"),
    "time of 4 bits": ("time_to_first_bits", "{:.2f}"),
    "peak of supervised": ("peak_of_supervised", "{:.2f}"),
    "h of a block MB": ("h_bytes_of_block", "{:,.3f}"),
    "h of all MB": ("h_bytes", "{:,.2f}"),
    "recomputing s": ("h_seconds_of_block", "{:.5f}"),
    "gradient s": ("gradient_seconds_of_block", "{:.4f}"),
    "share": ("share_of_time", "{:.2%}"),
    "layer": ("layer", "{}"),
    "draws": ("draws", "{}"),
    "cosine": ("cosine", "{:.4f}"),
    "equal signs": ("sign_agreement", "{:.1%}"),
    "relative error": ("relative_error", "{:,.1f}"),
    "update": ("update", "{}"),
    "learning rate": ("learning_rate", "{:.4g}"),
    "before": ("before", "{:.3f}"),
    "after": ("after", "{:.3f}"),
    "of best": ("of_best", "{:.0%}"),
    "step": ("step", "{:,}"),
    "training loss": ("training_loss", "{:.4f}"),
    "held-out loss": ("held_out_loss", "{:.4f}"),
}
SIZE = ("model", "blocks", "seq", "rank")
AVERAGED = ("s/step", "peak MB", "of paper", "of MeSP", "peak of MeBP", "time of MeBP", "cosine",
            "equal signs", "relative error")  # fmt: skip


def texts(row: Row) -> dict[str, str]:
    return {
        heading: "-" if row[key] is None else form.format(in_unit(heading, row[key]))
        for heading, (key, form) in COLUMNS.items()
        if key in row
    }


def in_unit(heading: str, value: Any) -> Any:
    return value / 1e6 if heading.endswith("MB") else value


def averages(rows: list[Row], by: tuple[str, ...], headings: list[str]) -> dict[str, str]:
    line = {name: texts(rows[0])[name] for name in by} | {"rows": str(len(rows))}
    for key, _ in map(COLUMNS.get, headings):
        values = [row[key] for row in rows if row[key] is not None]
        line |= texts({key: mean(values) if values else None})
    return line


def grouped(rows: list[Row], headings: tuple[str, ...]) -> list[list[Row]]:
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[COLUMNS[name][0]] for name in headings), []).append(row)
    return list(groups.values())
