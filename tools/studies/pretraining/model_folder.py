from __future__ import annotations

import json
import tempfile
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.qwen2 import Model
from tokenizers import Tokenizer

from mesp.errors import MespError, plain_os_errors
from mesp.folders import replacing
from studies.pretraining.text import END_OF_TEXT

# The model has not learned conversations, but this template lets users try chat data.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- message.role + ': ' + (message.content or '') -}}
{%- if message.role == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}"""


def model_card(facts: dict[str, str], config: dict, parameters: int) -> str:
    return f"""---
license: mit
language: en
library_name: transformers
---

# MeSP demo model

A tiny language model of the Qwen2.5 architecture, pretrained from scratch. It writes recognisable
English prose and knows nothing. It serves to try and test on-device fine-tuning without a
download. It is not useful for anything else.

| | |
|---|---|
| Parameters | {parameters:,} (embedding tied to the output) |
| Layers | {config["num_hidden_layers"]} |
| Hidden size | {config["hidden_size"]} |
| MLP size | {config["intermediate_size"]} |
| Attention heads | {config["num_attention_heads"]} |
| Key/value heads | {config["num_key_value_heads"]} |
| Vocabulary | {config["vocab_size"]}, byte-level BPE trained on the same text |
| Weights | {config["torch_dtype"]} |
| Text | {facts["text"]} |
| Held-out loss | {facts["loss"]} |

This command made it:

```sh
{facts["command"]}
```

The weights are under the MIT licence.
"""


def write_folder(
    out: Path, model: Model, tokenizer: Tokenizer, config: dict, facts: dict[str, str]
) -> None:
    weights = {name: w.astype(mx.float16) for name, w in tree_flatten(model.parameters())}
    end = tokenizer.token_to_id(END_OF_TEXT)
    documents = {
        "config.json": config,
        "generation_config.json": {
            "bos_token_id": end, "do_sample": False, "eos_token_id": end, "pad_token_id": end,
        },
        "tokenizer_config.json": {
            "add_prefix_space": False, "bos_token": None, "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False, "eos_token": END_OF_TEXT,
            "model_max_length": config["max_position_embeddings"], "pad_token": END_OF_TEXT,
            "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": None,
        },
    }  # fmt: skip
    card = model_card(facts, config, sum(w.size for w in weights.values()))
    with (
        plain_os_errors(f"Cannot write {out}"),
        replacing(out.resolve(), f"program is writing {out}") as folder,
    ):
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
        tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
        for name, content in documents.items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(card, encoding="utf-8")


def check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise MespError(f"{out} is a file, not a folder.")
    if out.is_dir() and any(out.iterdir()) and not (out / "config.json").is_file():
        raise MespError(f"{out} holds something other than a model; choose another folder.")
    with plain_os_errors(f"Cannot write {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out.parent).close()
