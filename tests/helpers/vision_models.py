"""Tiny models that read images, with random weights, as their makers publish them on the Hub."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import mlx.core as mx
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from helpers.models import TEXT

HIDDEN = 64
TILE = 32  # pixels
PATCH = 8  # pixels
SEQUENCE = (TILE // PATCH // 2) ** 2  # image tokens of a tile

_FAKE = "<fake_token_around_image>"
_LFM2_TILES = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)]
_SMOL_TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_SPECIAL = {
    "lfm2_vl": [
        *("<|pad|>", "<|startoftext|>", "<|im_start|>", "<|im_end|>", "<image>"),
        *("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *_LFM2_TILES),
    ],
    "smolvlm": [
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", _FAKE),
        *("<global-img>", "<end_of_utterance>", *_SMOL_TILES),
    ],
}
_SPECIAL["idefics3"] = _SPECIAL["smolvlm"]
FAMILIES = list(_SPECIAL)

_LLAMA_TEMPLATE = """<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}\
{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}\
{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}\
{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
_LFM2_TEMPLATE = """{{ bos_token }}{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\\n' }}\
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for line in message['content'] %}{% if line['type'] == 'image' %}{{ '<image>' }}\
{% elif line['type'] == 'text' %}{{ line['text'] }}{% endif %}{% endfor %}{% endif %}\
{{ '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_TEXT = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "num_channels": 3,
    "patch_size": PATCH,
}
_PIXELS = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_pad": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
}


def write_vision_model(
    folder: Path, family: str, *, dtype: mx.Dtype = mx.float32, seed: int = 0
) -> Path:
    """Writes a model folder of a family in FAMILIES: 2 text layers of width HIDDEN, a vision tower
    of 2 layers, a tokenizer and the processor's settings.

    An image is read in tiles of TILE pixels, with SEQUENCE image tokens each.
    """
    folder.mkdir(parents=True)
    tokens = _write_tokenizer(folder, family)
    is_lfm2 = family == "lfm2_vl"
    config, shapes = (_lfm2 if is_lfm2 else _idefics3)(family, len(tokens))
    config["image_token_id"] = tokens["<image>"]
    keys = iter(mx.random.split(mx.random.key(seed), len(shapes)))
    weights = {
        name: (_random(name, shape, next(keys))).astype(dtype) for name, shape in shapes.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    for name, settings in (_lfm2_settings() if is_lfm2 else _idefics3_settings(family)).items():
        (folder / f"{name}.json").write_text(json.dumps(settings))
    template = _LFM2_TEMPLATE if is_lfm2 else _LLAMA_TEMPLATE
    (folder / "chat_template.jinja").write_text(template)
    return folder


def picture(width: int, height: int, kind: str = "PNG", seed: int = 0, **options: Any) -> bytes:
    """Returns an image file of random pixels."""
    data = mx.random.randint(0, 256, (height, width, 3), key=mx.random.key(seed))
    file = BytesIO()
    Image.frombytes("RGB", (width, height), bytes(data.astype(mx.uint8))).save(
        file, kind, **options
    )
    return file.getvalue()


def _random(name: str, shape: tuple[int, ...], key: mx.array) -> mx.array:
    """Norms are near 1, biases near 0, and products keep the size of their inputs."""
    normal = mx.random.normal(shape, key=key)
    if name.endswith(".bias"):
        return 0.1 * normal
    if len(shape) == 1:
        return 1 + 0.1 * normal
    if "embed" in name and "patch" not in name:
        return normal
    size = 1
    for side in shape[1:]:
        size *= side
    return normal * size**-0.5


def _write_tokenizer(folder: Path, family: str) -> dict[str, int]:
    """Returns the vocabulary."""
    is_lfm2 = family == "lfm2_vl"
    special = _SPECIAL[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320 + len(special),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if is_lfm2:
        begin = "<|startoftext|>"
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{begin} $A", f"{begin} $A $B", [(begin, tokenizer.token_to_id(begin))]
        )
        config |= {"bos_token": begin, "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    else:
        config |= {
            "bos_token": "<|im_start|>",
            "eos_token": "<end_of_utterance>",
            "pad_token": "<|im_end|>",
        }
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab()


Shapes = dict[str, tuple[int, ...]]


def _linear(name: str, inputs: int, outputs: int, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def _norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _siglip(name: str) -> Shapes:
    size, inner = _VISION["hidden_size"], _VISION["intermediate_size"]
    shapes = _norm(f"{name}.post_layernorm", size)
    shapes[f"{name}.embeddings.position_embedding.weight"] = ((TILE // PATCH) ** 2, size)
    for i in range(_VISION["num_hidden_layers"]):
        layer = f"{name}.encoder.layers.{i}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _linear(f"{layer}.self_attn.{part}", size, size)
        shapes |= _norm(f"{layer}.layer_norm1", size) | _norm(f"{layer}.layer_norm2", size)
        shapes |= _linear(f"{layer}.mlp.fc1", size, inner)
        shapes |= _linear(f"{layer}.mlp.fc2", inner, size)
    return shapes


def _idefics3(family: str, vocabulary: int) -> tuple[dict[str, Any], Shapes]:
    text = {
        **_TEXT,
        "model_type": "llama",
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    name = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[family]
    config = {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": family,
        "scale_factor": 2,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "pad_token_id": 2,
        "text_config": text,
        "vision_config": {
            **_VISION,
            "model_type": "smolvlm_vision" if family == "smolvlm" else "idefics3_vision",
            "image_size": TILE,
        },
    }
    size, inner, heads = HIDDEN, _TEXT["intermediate_size"], _TEXT["num_attention_heads"]
    groups = size // heads * _TEXT["num_key_value_heads"]
    shapes = _siglip("model.vision_model")
    patches = "model.vision_model.embeddings.patch_embedding"
    shapes[f"{patches}.weight"] = (_VISION["hidden_size"], 3, PATCH, PATCH)
    shapes[f"{patches}.bias"] = (_VISION["hidden_size"],)
    projected = 4 * _VISION["hidden_size"]
    shapes |= _linear("model.connector.modality_projection.proj", projected, size, False)
    shapes["model.text_model.embed_tokens.weight"] = (vocabulary, size)
    for i in range(_TEXT["num_hidden_layers"]):
        layer = f"model.text_model.layers.{i}"
        for part, wide in (("q_proj", size), ("k_proj", groups), ("v_proj", groups)):
            shapes |= _linear(f"{layer}.self_attn.{part}", size, wide, False)
        shapes |= _linear(f"{layer}.self_attn.o_proj", size, size, False)
        shapes |= _linear(f"{layer}.mlp.gate_proj", size, inner, False)
        shapes |= _linear(f"{layer}.mlp.up_proj", size, inner, False)
        shapes |= _linear(f"{layer}.mlp.down_proj", inner, size, False)
        shapes[f"{layer}.input_layernorm.weight"] = (size,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (size,)
    shapes["model.text_model.norm.weight"] = (size,)
    shapes["lm_head.weight"] = (vocabulary, size)
    return config, shapes


def _lfm2(family: str, vocabulary: int) -> tuple[dict[str, Any], Shapes]:
    text = {
        **_TEXT,
        "model_type": "lfm2",
        "vocab_size": vocabulary,
        "norm_eps": 1e-5,
        "layer_types": ["conv", "full_attention"],
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": HIDDEN,
        "block_dim": HIDDEN,
        "block_ff_dim": _TEXT["intermediate_size"],
        "block_auto_adjust_ff_dim": False,
        "num_heads": _TEXT["num_attention_heads"],
        "bos_token_id": 1,
        "eos_token_id": 3,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    config = {
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "model_type": family,
        "downsample_factor": 2,
        "projector_bias": True,
        "projector_hidden_act": "gelu",
        "projector_hidden_size": 96,
        "projector_use_layernorm": True,
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": {
            **_VISION,
            "model_type": "siglip2_vision_model",
            "num_patches": (TILE // PATCH) ** 2,
            "vision_use_head": False,
        },
    }
    size, inner, heads = HIDDEN, _TEXT["intermediate_size"], _TEXT["num_attention_heads"]
    head = size // heads
    groups = head * _TEXT["num_key_value_heads"]
    vision = "model.vision_tower.vision_model"
    projected = 4 * _VISION["hidden_size"]
    shapes = _siglip(vision)
    shapes |= _linear(f"{vision}.embeddings.patch_embedding", 3 * PATCH**2, _VISION["hidden_size"])
    shapes |= _norm("model.multi_modal_projector.layer_norm", projected)
    shapes |= _linear("model.multi_modal_projector.linear_1", projected, 96)
    shapes |= _linear("model.multi_modal_projector.linear_2", 96, size)
    shapes["model.language_model.embed_tokens.weight"] = (vocabulary, size)
    shapes["model.language_model.embedding_norm.weight"] = (size,)
    for i, kind in enumerate(text["layer_types"]):
        layer = f"model.language_model.layers.{i}"
        if kind == "conv":
            shapes[f"{layer}.conv.conv.weight"] = (size, 1, 3)
            shapes |= _linear(f"{layer}.conv.in_proj", size, 3 * size, False)
            shapes |= _linear(f"{layer}.conv.out_proj", size, size, False)
        else:
            for part, wide in (("q_proj", size), ("k_proj", groups), ("v_proj", groups)):
                shapes |= _linear(f"{layer}.self_attn.{part}", size, wide, False)
            shapes |= _linear(f"{layer}.self_attn.out_proj", size, size, False)
            shapes[f"{layer}.self_attn.q_layernorm.weight"] = (head,)
            shapes[f"{layer}.self_attn.k_layernorm.weight"] = (head,)
        shapes |= _linear(f"{layer}.feed_forward.w1", size, inner, False)
        shapes |= _linear(f"{layer}.feed_forward.w3", size, inner, False)
        shapes |= _linear(f"{layer}.feed_forward.w2", inner, size, False)
        shapes[f"{layer}.operator_norm.weight"] = (size,)
        shapes[f"{layer}.ffn_norm.weight"] = (size,)
    return config, shapes


def _idefics3_settings(family: str) -> dict[str, dict[str, Any]]:
    name = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[family]
    image = {
        **_PIXELS,
        "image_processor_type": f"{name}ImageProcessor",
        "processor_class": f"{name}Processor",
        "do_image_splitting": True,
        "do_resize": True,
        "max_image_size": {"longest_edge": TILE},
        "size": {"longest_edge": 4 * TILE},
        "resample": 1,
    }
    processor = {"processor_class": f"{name}Processor", "image_seq_len": SEQUENCE}
    return {"preprocessor_config": image, "processor_config": processor}


def _lfm2_settings() -> dict[str, dict[str, Any]]:
    image = {
        **_PIXELS,
        "image_processor_type": "Lfm2VlImageProcessorFast",
        "processor_class": "Lfm2VlProcessor",
        "do_image_splitting": True,
        "do_resize": False,
        "downsample_factor": 2,
        "encoder_patch_size": PATCH,
        "max_image_tokens": 2 * SEQUENCE,
        "max_pixels_tolerance": 2.0,
        "max_tiles": 10,
        "min_image_tokens": SEQUENCE,
        "min_tiles": 2,
        "resample": 2,
        "tile_size": TILE,
        "use_thumbnail": True,
    }
    processor = {"processor_class": "Lfm2VlProcessor", "use_image_special_tokens": True}
    return {"preprocessor_config": image, "processor_config": processor}
