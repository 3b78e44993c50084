"""Bundles of formats 2 and 3, which `mesp-export --from` writes anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mesp.data.examples import Split

if TYPE_CHECKING:
    from mesp.bundle.reader import Bundle


def architecture_now(old: dict[str, Any]) -> dict[str, Any]:
    """The `architecture` of a manifest as it is now.

    There, all blocks mixed their tokens by attention: its modules were those of the whole block,
    its heads the architecture's, and kinds of attention differed in RoPE and windows. Raises
    KeyError or TypeError where it is damaged.
    """
    of_mixer = (
        "num_attention_heads", "num_key_value_heads", "head_dim", "qk_norm", "attention_scale",
        "attn_logit_softcapping",
    )  # fmt: skip
    kept = {k: v for k, v in old.items() if k not in (*of_mixer, "modules", "attention")}
    parts = {
        part: [module for module in old["modules"] if module[0].startswith(part)]
        for part in ("self_attn", "mlp")
    }
    common = {"type": "attention", "modules": parts["self_attn"], "output_gate": False}
    common |= {key: old[key] for key in of_mixer}
    return kept | {
        "logits_scaling": 1.0,
        "mlx_prefix": "model",
        "hf_prefix": "model",
        "mlp": parts["mlp"],
        "mixers": [common | kind for kind in old["attention"]],
    }


def splits_of_format_2(bundle: Bundle) -> dict[str, Split]:
    """The data of a bundle of format 2, whose examples are uint32 [M, 3]: (start, length, prompt),
    the first `prompt` tokens of each, and they alone, not being in the loss."""
    splits = {}
    for split, entry in bundle.manifest["data"].items():
        tokens, examples, mask = bundle.tokens(split), None, None
        if "examples" in entry:
            rows = np.fromfile(bundle.path / entry["examples"]["file"], "<u4").reshape(-1, 3)
            examples = rows[:, :2]
            if rows[:, 2].any():
                mask = np.ones(len(tokens), np.uint8)
                # The first token is no prediction, but in the example before it, which shares it.
                for start, _, prompt in rows.tolist():
                    mask[start + 1 : start + prompt] = 0
        splits[split] = Split(tokens, examples, mask)
    return splits
