"""Makes the cases that the Swift tests compare the trainer with the reference on.

    python tests/make_cases.py FOLDER

Each case is a folder with `bundle.mesp` and what tests/make_fixtures.py computes on it. A name
with `bfloat16` tells the dtype, and one with `gpu` that the functions are the GPU's, traced on the
CPU: there `mx.fast`'s primitives are plain operations, and the rest is what runs on a GPU.

tied-32 has `text_ids.json` too: the ids that the commands make of texts.
"""

import json
import multiprocessing
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import mlx.core as mx  # before OpenBLAS: the engine, which has that, is compared with another
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, models, processors

# isort: split
import make_fixtures
from conftest import (
    FAMILIES,
    HEADS_64,
    TEXT,
    TINY,
    dequantize_once,
    random_tensors,
    run,
    write_mixed_model,
    write_model,
    write_model_in_5_bits,
)
from mesp import text as prompts
from mesp.block_function import trace
from mesp.bundle import function_files, writer
from mesp.data.records import Document
from mesp.data.sources import Selection, read_documents
from mesp.data.tokens import begin_of_text, cut_text, encoder
from mesp.evaluation.model import Model
from mesp.text import load_tokenizer

UNTIED = {**TINY, "num_hidden_layers": 2, "tie_word_embeddings": False, "rope_theta": 1e6}
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
    ("granite", FAMILIES["granite"], 9, 4),
    ("granite4", FAMILIES["granitemoehybrid"], 9, 4),
    ("qwen3_5", FAMILIES["qwen3_5"], 70, 4),
    ("lfm2", FAMILIES["lfm2"], 9, 4),
    ("mixed", {**TINY, "tie_word_embeddings": False}, 9, 4),
    ("5-bits", TINY, 9, 4),
    ("mxfp4", TINY, 9, 4, "--mode", "mxfp4"),
    ("nvfp4", FAMILIES["phi3"], 9, 4, "--mode", "nvfp4"),
    ("mxfp8", FAMILIES["qwen3"], 9, 4, "--mode", "mxfp8"),
    ("gemma2-bfloat16", FAMILIES["gemma2"], 9, 4, "--dtype", "bfloat16"),
    ("qwen3-bfloat16", FAMILIES["qwen3"], 9, 4, "--mode", "mxfp4", "--dtype", "bfloat16"),
    ("qwen3_5-bfloat16", FAMILIES["qwen3_5"], 40, 4, "--dtype", "bfloat16"),
    ("lfm2-bfloat16", FAMILIES["lfm2"], 9, 4, "--dtype", "bfloat16"),
    ("wide-bfloat16", WIDE, 64, 8, "--dtype", "bfloat16"),
    ("tied-gpu", {**TINY, "hidden_size": 256}, 20, 4),
    ("qwen3-gpu", {**FAMILIES["qwen3"], **HEADS_64}, 9, 4, "--group-size", 32),
    ("gemma2-gpu", FAMILIES["gemma2"], 9, 4, "--group-size", 32),
    ("phi3-gpu", FAMILIES["phi3"], 9, 4, "--mode", "nvfp4"),
    ("qwen3_5-gpu", FAMILIES["qwen3_5"], 70, 4),
    ("lfm2-gpu", FAMILIES["lfm2"], 9, 4),
    ("5-bits-gpu", TINY, 9, 4),
    ("qwen3-gpu-bfloat16", {**FAMILIES["qwen3"], **HEADS_64}, 9, 4, "--dtype", "bfloat16"),
    ("gemma2-gpu-bfloat16", FAMILIES["gemma2"], 9, 4, "--dtype", "bfloat16"),
    ("wide-gpu-bfloat16", WIDE, 64, 8, "--dtype", "bfloat16"),
]


def export_for_gpu(patch: pytest.MonkeyPatch) -> None:
    """Lets mesp-export write the GPU's functions on the CPU.

    The CPU's `quantized_matmul` adds up in its operands' dtype: here, as on the GPU, sums are
    float32, and rounded in the end.
    """
    write, export, multiply = writer.write_functions, trace.export_block, mx.quantized_matmul

    def write_for_gpu(folder, arch, layouts, options):
        return write(folder, arch, layouts, replace(options, device="gpu"))

    def export_on_cpu(path, function, block, layout, dtype, device, *sizes):
        export(path, function, block, layout, dtype, "cpu", *sizes)

    def quantized_matmul(x, weight, scales, biases, **quantization):
        packed = (scales, biases)
        if biases is not None:
            packed = (a.astype(mx.float32) for a in packed)
        return multiply(x.astype(mx.float32), weight, *packed, **quantization).astype(x.dtype)

    patch.setattr(writer, "write_functions", write_for_gpu)
    patch.setattr(function_files, "export_block", export_on_cpu)
    patch.setattr(function_files, "fused", mx.fast)
    patch.setattr(mx, "quantized_matmul", quantized_matmul)


def make(folder: Path, name: str, config: dict, length: int, rank: int, *options: object) -> None:
    case = folder / name
    case.mkdir(parents=True)
    lengths = ("--seq-len", length, "--rank", rank)
    wide = name.startswith("wide")
    with tempfile.TemporaryDirectory() as source, pytest.MonkeyPatch.context() as patch:
        if name == "mixed":
            model = write_mixed_model(Path(source, "model"), config)
        elif name.startswith("5-bits"):
            model = write_model_in_5_bits(Path(source, "model"), config)
        else:
            tensors = (wide_tensors if wide else random_tensors)(config)
            model = write_model(Path(source, "model"), config, tensors)
        text = Path(source, "text.txt")
        text.write_text(TEXT)
        if "gpu" in name:
            export_for_gpu(patch)
        files = ("--model", model, "--data", text, "--out", case / "bundle.mesp")
        if name != "mixed" and not name.startswith("5-bits"):  # which come quantized
            options = (*options, "--quantize", "nearest")
            if not {"--mode", "--bits"} & {*options}:
                options += ("--head-bits", "4")
        done = run("export", *files, *lengths, *options)
        assert done.returncode == 0, done.stderr
    if name == "wide-gpu-bfloat16":
        return  # the reference has no device: `main` takes what it computed of the CPU's case
    with pytest.MonkeyPatch.context() as patch:
        dequantize_once(patch)
        steps = ("--steps", 0) if wide else ()
        if "gpu" in name and not wide:  # its products take a CPU long
            steps = ("--steps", 5, "--mezo-steps", 2)
        make_fixtures.main(list(map(str, (case / "bundle.mesp", case, *lengths, *steps))))


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


WORDS = "The quick brown fox jumps over the lazy dog"
FILE = "\ufeffThe quick brown fox\r\njumps over\rthe lazy dog\n"
PARAGRAPH = "Some ✓ words,\n\n  indented \n\t and\n\n\n more!\n = Title = \n"
QUESTIONS = [("The quick ", ["brown fox", " dog"]), (" \n", ["The", "A dog"])]


def text_ids() -> dict:
    """What the commands make of texts, with a tokenizer that begins them with a token, with one
    that has such a token and does not, and with one that has none; and where they cut a long one.
    """

    class Engine:
        def text(self, tokens: list[int], window: int) -> float:
            self.tokens = tokens
            return 0.0

    made = []
    for has_begin, adds_begin in ((True, True), (True, False), (False, False)):
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = byte_tokenizer(Path(folder), has_begin, adds_begin)
            Path(folder, "text.txt").write_bytes(FILE.encode())
            (file,) = read_documents(f"{folder}/text.txt", Selection())["train"]
        model = Model(Engine(), tokenizer, len(WORDS))
        model.log_likelihood(WORDS)
        train = encoder("text", tokenizer, "all", chat=False)
        joined = encoder("prompt and completion", tokenizer, "answers", chat=False)
        answer = joined(Document("A record", {"prompt": WORDS, "completion": " again"}))
        questions = [
            {"prompt": prompt, "choices": choices}
            | {"ids": [model.encode_pair(prompt, choice) for choice in choices]}
            for prompt, choices in QUESTIONS
        ]
        of_words = {
            "text": model.engine.tokens,
            "prompt": prompts.encode(tokenizer, WORDS, chat=None),
            "file": train(file)[0],
            "begin": begin_of_text(tokenizer),
            "record": train(Document("A record", {"text": WORDS}))[0],
            "answer": answer[0],
            "answer_counted": answer[1].tolist(),
        }
        begin = {"begin_of_text": tokenizer.bos_token_id, "adds_begin": adds_begin}
        made.append({**begin, **of_words, "questions": questions})
    pieces = [len(piece) for piece in cut_text(PARAGRAPH * 1000)]
    texts = {"words": WORDS, "file": FILE, "paragraph": PARAGRAPH, "pieces": pieces}
    return {**texts, "tokenizers": made}


def byte_tokenizer(folder: Path, has_begin: bool, adds_begin: bool) -> TokenizerWrapper:
    """A token a byte: 0 ends a text, and 1 begins it."""
    end, begin, *others = (f"<0x{byte:02X}>" for byte in range(256))
    vocabulary = {token: byte for byte, token in enumerate([end, begin, *others])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    if adds_begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, vocabulary[begin])]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    config |= {"bos_token": begin} if has_begin else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


def main() -> None:
    # Not forked: MLX's threads would be missing.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for made in [pool.submit(make, Path(sys.argv[1]), *case) for case in CASES]:
            made.result()
    Path(sys.argv[1], "tied-32", "text_ids.json").write_text(json.dumps(text_ids()))
    wide = Path(sys.argv[1], "wide-bfloat16")
    shutil.copy(wide / "gradients.safetensors", wide.with_name("wide-gpu-bfloat16"))


if __name__ == "__main__":
    main()
