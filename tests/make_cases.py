"""Makes the cases that the Swift tests compare the trainer with the reference on.

    python tests/make_cases.py FOLDER

Each case is a folder with `bundle.mesp` and what tests/make_fixtures.py computes on it. A name
with `bfloat16` tells the dtype, and one with `gpu` that the functions are the GPU's, traced on the
CPU: there `mx.fast`'s primitives are plain operations, and the rest is what runs on a GPU.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx

from conftest import FAMILIES, TEXT, TINY, random_tensors, write_mixed_model, write_model

UNTIED = {**TINY, "num_hidden_layers": 2, "tie_word_embeddings": False, "rope_theta": 1e6}
# With heads that the GPU's fused attention takes.
HEADS_64 = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
# Qwen2.5-0.5B's width.
WIDE = {**TINY, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14}
WIDE |= {"num_hidden_layers": 2, "rope_theta": 1e6}
# Name, config.json, length, rank, and more options of mesp-export.
CASES = [
    ("tied-32", TINY, 32, 8),
    ("tied-7", TINY, 7, 4),
    ("untied-7", UNTIED, 7, 4),
    ("qwen3", FAMILIES["qwen3"], 7, 4, "--group-size", 32),
    ("llama3", FAMILIES["llama"], 20, 4),
    ("smollm3", FAMILIES["smollm3"], 9, 2, "--bits", 8),
    ("mistral", FAMILIES["mistral"], 12, 4),
    ("gemma3", FAMILIES["gemma3_text"], 32, 4),
    ("gemma2", FAMILIES["gemma2"], 9, 4, "--group-size", 32),
    ("phi3", FAMILIES["phi3"], 16, 4),
    ("mixed", {**TINY, "tie_word_embeddings": False}, 9, 4),
    ("mxfp4", TINY, 9, 4, "--mode", "mxfp4"),
    ("nvfp4", FAMILIES["phi3"], 9, 4, "--mode", "nvfp4"),
    ("mxfp8", FAMILIES["qwen3"], 9, 4, "--mode", "mxfp8"),
    ("gemma2-bfloat16", FAMILIES["gemma2"], 9, 4, "--dtype", "bfloat16"),
    ("qwen3-bfloat16", FAMILIES["qwen3"], 9, 4, "--mode", "mxfp4", "--dtype", "bfloat16"),
    ("wide-bfloat16", WIDE, 64, 8, "--dtype", "bfloat16"),
    ("tied-gpu", {**TINY, "hidden_size": 256}, 20, 4),
    ("qwen3-gpu", {**FAMILIES["qwen3"], **HEADS_64}, 9, 4, "--group-size", 32),
    ("gemma2-gpu", FAMILIES["gemma2"], 9, 4, "--group-size", 32),
    ("phi3-gpu", FAMILIES["phi3"], 9, 4, "--mode", "nvfp4"),
    ("qwen3-gpu-bfloat16", {**FAMILIES["qwen3"], **HEADS_64}, 9, 4, "--dtype", "bfloat16"),
    ("gemma2-gpu-bfloat16", FAMILIES["gemma2"], 9, 4, "--dtype", "bfloat16"),
    ("wide-gpu-bfloat16", WIDE, 64, 8, "--dtype", "bfloat16"),
]
# mesp-export with the GPU's functions on the CPU, whose `quantized_matmul` adds up in its operands'
# dtype: as on the GPU, sums are float32, and rounded in the end.
EXPORT_GPU = """
import mlx.core as mx
from mesp.bundle import function_files
from mesp.commands.export import main

of_device, multiply = function_files.block_function, mx.quantized_matmul

def of_gpu(arch, kind, layout, device, plain):
    return of_device(arch, kind, layout, "gpu", plain)

def quantized_matmul(x, weight, scales, biases, **quantization):
    wide = (scales, biases) if biases is None else (a.astype(mx.float32) for a in (scales, biases))
    return multiply(x.astype(mx.float32), weight, *wide, **quantization).astype(x.dtype)

function_files.block_function, mx.quantized_matmul = of_gpu, quantized_matmul
main()
"""


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)


def wide_tensors(config: dict) -> dict[str, mx.array]:
    """`random_tensors` with biases of k as large as Qwen2.5's:

    of each key head, hundreds in the pair that RoPE turns least, tens in the next.
    """
    tensors = random_tensors(config)
    for name, bias in tensors.items():
        if name.endswith("k_proj.bias"):
            heads = bias.reshape(config["num_key_value_heads"], 2, -1)
            heads[..., -2:] = heads[..., -2:] * mx.array([40.0, 400.0])
            tensors[name] = heads.reshape(-1)
    return tensors


def main() -> None:
    export = Path(sys.executable).with_name("mesp-export")
    make_fixtures = Path(__file__).with_name("make_fixtures.py")
    for name, config, length, rank, *options in CASES:
        case = Path(sys.argv[1], name)
        lengths = ("--seq-len", length, "--rank", rank)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model")
            if name == "mixed":
                model = write_mixed_model(path, config)
            else:
                tensors = (wide_tensors if config is WIDE else random_tensors)(config)
                model = write_model(path, config, tensors)
            text = Path(folder, "text.txt")
            text.write_text(TEXT)
            case.mkdir(parents=True)
            out = ("--out", case / "bundle.mesp")
            command = (sys.executable, "-c", EXPORT_GPU) if "gpu" in name else (export,)
            run(*command, "--model", model, "--data", text, *out, *lengths, *options)
        steps = ("--steps", 0) if config is WIDE else ()
        if name == "wide-gpu-bfloat16":  # the reference has no device
            shutil.copy(case.with_name("wide-bfloat16") / "gradients.safetensors", case)
            continue
        run(sys.executable, make_fixtures, case / "bundle.mesp", case, *lengths, *steps)


if __name__ == "__main__":
    main()
