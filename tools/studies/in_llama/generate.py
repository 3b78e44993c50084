"""Generates with llama.cpp, in an environment that has xllamacpp and neither MLX nor MeSP.

    python -m studies.in_llama.generate SETTINGS.json

Reads a request per line, for example `{"prompts": [[1, 2]], "tokens": 8}` with token ids. Keys and
values are float32. llama.cpp quantizes activations to 8 bits.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xllamacpp

from studies.benchmarks.footprint import Peak


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    peak, at_once = Peak(), settings["at_once"]
    params = xllamacpp.CommonParams()
    params.model.path = settings["gguf"]
    params.n_parallel, params.n_gpu_layers, params.verbosity = at_once, 0, -1
    params.n_ctx = at_once * settings["context"]
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    server = xllamacpp.Server(params)

    def write(prompt: list[int], tokens: int) -> int:
        request: dict[str, Any] = {"prompt": prompt, "n_predict": tokens, "temperature": 0}
        request |= {"ignore_eos": True, "cache_prompt": False}
        return server.handle_completions(request)["usage"]["completion_tokens"]

    with ThreadPoolExecutor(at_once) as pool:
        for line in sys.stdin:
            request = json.loads(line)
            tokens = [request["tokens"]] * len(request["prompts"])
            written = [*pool.map(write, request["prompts"], tokens)]
            print(json.dumps({"written": written, "peak_bytes": peak.bytes}), flush=True)


if __name__ == "__main__":
    main()
