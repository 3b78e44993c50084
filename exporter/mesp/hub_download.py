from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mesp.errors import FULL_DISK, MespError
from mesp.license import LICENSE_PATTERNS

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "tekken.json", "tiktoken.model", "spiece.model",
    "vocab.json",
)  # fmt: skip
TERMS = ("README.md", *LICENSE_PATTERNS)
MODEL_FILES = ("config.json", *TOKENIZER_FILES, *VOCABULARIES, *TERMS)
WEIGHTS = ("model*.safetensors", "*.safetensors.index.json")


def refuse_path(name: str) -> None:
    if name.startswith("~"):
        raise MespError(f"There is no folder or file {name}: write the path out, without ~.")
    is_rooted = name.startswith((".", "/")) or "\\" in name or name.endswith("/")
    # A GGUF file on the Hub is named OWNER/NAME/FILE.gguf.
    if is_rooted or (name.count("/") > 1 and not name.lower().endswith(".gguf")):
        raise MespError(f"There is no folder or file {name}; correct the path.")


def download_model(repo: str, with_weights: bool) -> Path:
    return download("model", repo, [*MODEL_FILES, *(WEIGHTS if with_weights else ())])


def list_gguf_files(repo: str) -> list[str]:
    names = (name for name in list_files(repo) if name.lower().endswith(".gguf"))
    return [name for name in names if "mmproj" not in name.lower()]


def choose_gguf_file(repo: str, quantization: str) -> str:
    """Returns the repository's GGUF file with the given quantization, such as Q4_K_M, in its name.

    Of several such files, prefers one that is not in a subfolder and has a short name.
    """
    names = list_gguf_files(repo)
    wanted = re.compile(rf"(^|[-._/]){re.escape(quantization)}[-._]", re.I)
    found = filter(wanted.search, names)
    chosen = min(found, key=lambda name: (name.count("/"), len(name), name), default=None)
    if chosen is None:
        raise MespError(
            f"{repo} on the Hugging Face Hub has no GGUF file of {quantization}; it has "
            f"{', '.join(names) or 'none'}."
        )
    return chosen


def download_gguf_file(repo: str, file: str) -> Path:
    folder = download("model", repo, [file, *TERMS])
    if not (folder / file).is_file():
        raise MespError(f"{repo} on the Hugging Face Hub has no file {file}.")
    return folder


def download(kind: str, repo: str, patterns: list[str], revision: str | None = None) -> Path:
    """Returns the folder with the files of a repository that match `patterns`.

    `kind` is ``model`` or ``dataset``. The folder's name is the hash of the revision's commit.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        disable_progress_bars()
    with _plain_errors(kind, repo):
        return Path(
            snapshot_download(repo, repo_type=kind, allow_patterns=patterns, revision=revision)
        )


def list_files(repo: str, kind: str = "model") -> list[str]:
    """Returns the paths of a repository's files. In offline mode, returns the downloaded files."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    with _plain_errors(kind, repo):
        try:
            return HfApi().list_repo_files(repo, repo_type=kind)
        except OfflineModeIsEnabled:
            folder = download(kind, repo, [])
            return [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]


@contextmanager
def _plain_errors(kind: str, repo: str) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        yield
    except MespError:
        raise
    except errors.GatedRepoError as error:
        page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{repo}"
        raise MespError(
            f"{repo} asks its users to accept terms; accept them on {page} and log in with "
            "`hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise MespError(
            f"There is no {kind} {repo} on the Hugging Face Hub (or it is private: log in with "
            "`hf auth login`), nor a folder of that name."
        ) from error
    except Exception as error:  # libraries raise various errors for a broken connection
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            raise MespError(f"The disk is full, so {repo} could not be downloaded.") from error
        raise MespError(
            f"{repo} could not be downloaded from the Hugging Face Hub: check the network and try "
            f"again, or give a folder that holds the {kind}."
        ) from error
