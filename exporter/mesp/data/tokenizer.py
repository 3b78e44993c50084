from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mesp.data.loss_mask import end_tokens
from mesp.errors import MespError, plain_errors
from mesp.files import read_object, root_of
from mesp.hub_download import VOCABULARIES

ROUND_TRIP_TEXT = "A text of 2 lines,\nwhich comes back."


def load_checked_tokenizer(folder: Path, model: str) -> Any:
    if not _has_tokenizer(folder):
        return None
    tokenizer = load_tokenizer(folder)
    with plain_errors(f"The tokenizer of {model} cannot be used"):
        found = tokenizer.decode(_encode_round_trip(tokenizer), skip_special_tokens=True)
    if found != ROUND_TRIP_TEXT:
        missing = [name for name in VOCABULARIES if (folder / name).is_file()]
        reason = "" if missing else f" (no vocabulary is there, such as {VOCABULARIES[0]})"
        raise MespError(
            f"The tokenizer of {model} loses text: {ROUND_TRIP_TEXT!r} becomes "
            f"{found!r:.80}{reason}; take all files of the model's tokenizer, or none."
        )
    return tokenizer


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Raises MespError if transformers cannot write `tokenizer.json`, or if the new file encodes a
    test text differently.
    """
    failed = f"The tokenizer {type(tokenizer._tokenizer).__name__} cannot be written"
    with plain_errors(failed):
        tokenizer._tokenizer.save_pretrained(folder)
        same = (folder / VOCABULARIES[0]).is_file() and (
            _encode_round_trip(load_tokenizer(folder)) == _encode_round_trip(tokenizer)
        )
    if not same:
        raise MespError(f"{failed} as tokenizer.json; take a model that has one.")


def _encode_round_trip(tokenizer: Any) -> list[int]:
    return list(tokenizer.encode(ROUND_TRIP_TEXT, add_special_tokens=False))


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer_config.json", *VOCABULARIES))


def load_tokenizer(
    folder: Path, without: str = "so --data cannot be used with it; take a model with one"
) -> Any:
    """Returns the tokenizer in a model's folder or a bundle, in mlx-lm's wrapper.

    The end tokens come from the tokenizer's files, the model's files and the chat template. Code in
    the folder is never run. Raises MespError if the tokenizer cannot be loaded, or if the folder
    has none.
    """
    if not _has_tokenizer(folder):
        raise MespError(f"{folder} has no tokenizer, {without}.")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Texts are encoded one at a time. Other threads would only wait, which takes CPU time.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from mesp.dependencies import mlx_lm

    failed = f"The tokenizer in {folder} cannot be loaded"
    root = root_of(folder)
    # transformers may open these files, so they must not be links out of the folder.
    for file in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if file.suffix in (".json", ".jinja", ".txt", ".model") and not (
            file.is_file() and file.resolve().is_relative_to(root)
        ):
            raise MespError(
                f"{failed}: {file.name} is not a regular file; put the file there, or remove it."
            )
    with plain_errors(failed):
        file = folder / "tokenizer_config.json"
        config = read_object(file) if file.exists() else {}
        options = {"local_files_only": True, "trust_remote_code": False}
        try:
            options["config"] = _kind_of_model(folder)
            tokenizer = mlx_lm.tokenizer_utils.load(folder, options, _ends_of_model(folder))
        except Exception as error:
            if "trust_remote_code" in str(error) or "auto_map" in config:
                raise MespError(
                    f"{failed}: it is Python code, which is not run; take a model whose tokenizer "
                    "is data."
                ) from error
            raise
        # Some tokenizers raise errors only when used.
        tokenizer.encode("a")
        _ = tokenizer.detokenizer
        tokenizer.eos_token_ids = end_tokens(tokenizer)
        return tokenizer


def _ends_of_model(folder: Path) -> list[int] | None:
    """Raises ValueError if an end token is not an integer."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        ends = read_object(file).get("eos_token_id") if file.exists() else None
        if ends is not None:
            ends = ends if isinstance(ends, list) else [ends]
            if not all(type(end) is int for end in ends):
                raise ValueError(
                    f"the eos_token_id of {name} is neither a number nor a list of them"
                )
            return ends
    return None


def _kind_of_model(folder: Path) -> Any:
    """Returns the configuration by which transformers chooses a tokenizer's class.

    The sizes in config.json are left out, because transformers would create lists of these sizes,
    which may be huge.
    """
    from transformers import AutoConfig, PreTrainedConfig

    file = folder / "config.json"
    config = read_object(file) if file.exists() else {}
    named = {key: config[key] for key in ("tokenizer_class", "model_name") if key in config}
    try:
        return AutoConfig.for_model(config.get("model_type", ""), **named)
    except (ValueError, TypeError):  # an unknown model_type
        return PreTrainedConfig(**named)


def load_bundle_tokenizer(bundle: Path) -> Any:
    tokenizer = load_tokenizer(bundle, "which generating needs; export a model that has one")
    with plain_errors(f"The manifest of {bundle} cannot be read"):
        ends = read_object(bundle / "manifest.json").get("end_tokens", [])
        tokenizer.eos_token_ids = {*tokenizer.eos_token_ids, *map(int, ends)}
    return tokenizer
