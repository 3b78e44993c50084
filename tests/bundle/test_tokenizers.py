import base64
import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers

from helpers.exports import NEAREST, export, exported, refused
from helpers.models import FAMILIES, TEXT, write_model
from mesp.bundle.reader import Bundle
from mesp.data.tokenizer import ROUND_TRIP_TEXT, load_bundle_tokenizer

pytestmark = pytest.mark.usefixtures("working_folder")
SIZE = ("--seq-len", 8, "--group-size", 32, *NEAREST)
CONFIG = FAMILIES["llama-linear"] | {"vocab_size": 512}
LLAMA = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "add_bos_token": True,
    "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
}


def model(tokenizer: dict | None = None, config: dict = CONFIG) -> Path:
    folder = write_model(Path("model"), config, tokenizer=False)
    if tokenizer is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def text_survives(bundle: Bundle) -> None:
    tokenizer = load_bundle_tokenizer(bundle.path)
    text = "The quick brown fox,  12 ☃"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > 5 and tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_sentencepiece_model_becomes_a_tokenizer_json():
    folder = model(LLAMA)
    Path("text.txt").write_text(TEXT)
    sentencepiece.SentencePieceTrainer.train(
        input="text.txt", model_prefix=str(folder / "tokenizer"), vocab_size=400,
        model_type="bpe", byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip
    bundle = exported("--model", folder, "--data", "text.txt", *SIZE)
    assert (bundle.path / "tokenizer.json").is_file()
    assert not (bundle.path / "tokenizer.model").exists()
    text_survives(bundle)
    tokenizer = load_bundle_tokenizer(bundle.path)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    expected = processor.encode(ROUND_TRIP_TEXT)
    assert list(tokenizer.encode(ROUND_TRIP_TEXT)) == [tokenizer.bos_token_id, *expected]
    assert tokenizer.has_chat_template and tokenizer.eos_token_ids == {2}
    assert len(bundle.tokens("train")) > 200


def tekken() -> dict:
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"qu", b"ick"]
    vocab = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for i, token in enumerate(tokens)
    ]
    names = ("<unk>", "<s>", "</s>")
    special = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)]
    config = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+",
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": len(tokens) + 3,
        "default_num_special_tokens": 3,
        "version": "v3",
    }
    return {"config": config, "vocab": vocab, "special_tokens": special}


def test_a_tekken_vocabulary_is_converted_or_refused():
    folder = model(config={**FAMILIES["mistral"], "vocab_size": 512})
    (folder / "tekken.json").write_text(json.dumps(tekken()))
    text_survives(exported("--model", folder, *SIZE))


def test_a_vocabulary_that_is_missing_is_named():
    folder = model(LLAMA)
    Path("text.txt").write_text(TEXT)
    for data in ((), ("--data", "text.txt")):
        assert "The tokenizer of model loses text" in refused("--model", folder, *SIZE, *data)


def test_a_tokenizer_json_alone_is_enough():
    folder = write_model(Path("model"), CONFIG)
    (folder / "tokenizer_config.json").unlink()
    text_survives(exported("--model", folder, *SIZE))


def test_a_tokenizer_that_loses_text_is_refused():
    folder = model({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "?"})
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "text": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    said = refused("--model", folder, *SIZE)
    assert "The tokenizer of model loses text" in said and "or none" in said
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    shutil.rmtree("out.mesp", ignore_errors=True)
    assert exported("--model", folder, *SIZE)


def test_templates_that_are_not_read_are_named():
    folder = write_model(Path("model"), CONFIG)
    (folder / "chat_template.json").write_text('{"chat_template": ""}')
    result = export("--model", folder, *SIZE, "--out", "out.mesp")
    assert result.exit_code == 0
    assert result.stderr == (
        "chat_template.json of model is not read; the chat template is that of "
        "chat_template.jinja or tokenizer_config.json.\n"
    )
