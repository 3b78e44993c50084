from collections.abc import Iterable
from typing import Any

from helpers.paths import DEMO_MODEL
from mesp.data.tokenizer import load_tokenizer

# A template in ChatML. In the templates of this file, ⟦ and ⟧ stand where TRL's copies mark the
# beginning and the end of an answer.
CHATML = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}⟦{{- m.content + '<|im_end|>\\n' }}⟧
{%- else %}{{- m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

SMOLLM = (
    """\
{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\\nYou are SmolLM.<|im_end|>\\n' }}{%- endif %}
"""
    + CHATML
)

QWEN = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}⟦{{- m.content }}
{%- for call in m.tool_calls or [] %}{%- if m.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}⟧
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

QWEN3 = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') \
if '</think>' in m.content else '' %}
{{- '<|im_start|>assistant\\n' }}⟦
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}{%- if content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}⟧
{%- elif m.role == 'tool' %}
{{- '<|im_start|>tool\\n' + m.content + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA = """\
{{- bos_token }}
{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|eot_id|>' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{- m.content | tojson }}
{{- '<|eot_id|>' }}
{%- elif m.role == 'assistant' %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}⟦
{%- if m.tool_calls %}{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{- '}' }}
{%- else %}{{- m.content | trim }}{%- endif %}{{- '<|eot_id|>' }}⟧
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

GEMMA = """\
{{- bos_token }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate') }}{%- endif %}
{%- if m.role == 'assistant' %}{{- '<start_of_turn>model\\n' }}⟦
{{- m.content | trim + '<end_of_turn>\\n' }}⟧
{%- else %}{{- '<start_of_turn>user\\n' + m.content | trim + '<end_of_turn>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

PHI = """\
{%- for m in messages %}
{{- '<|' + m.role + '|>\\n' }}
{%- if m.role == 'assistant' %}⟦{{- m.content + '<|end|>\\n' }}⟧
{%- else %}{{- m.content + '<|end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}
{%- elif messages[-1].role == 'assistant' %}⟦{{- eos_token }}⟧
{%- else %}{{- eos_token }}{%- endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}⟦{{- ' ' + m.content + '</s>' }}⟧
{%- else %}{{- '[INST] ' + m.content + ' [/INST]' }}{%- endif %}
{%- endfor %}"""

TEMPLATES = {
    "smollm": SMOLLM,
    "qwen2.5": QWEN,
    "qwen3": QWEN3,
    "llama": LLAMA,
    "gemma": GEMMA,
    "phi": PHI,
    "mistral": MISTRAL,
}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>", "<|end|>", "<|user|>", "<|assistant|>", "</s>"]


def tokenizer_with(special: Iterable[str], template: str) -> Any:
    """Returns the demo model's tokenizer with the template and with tokens of other models."""
    tokenizer = load_tokenizer(DEMO_MODEL)._tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": sorted({*special, "<|bos|>"})})
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.bos_token, tokenizer.chat_template = "<|bos|>", template
    return tokenizer


def unmarked(template: str) -> str:
    return template.replace("⟦", "").replace("⟧", "")
