"""Downloads from the Hugging Face Hub."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mesp.errors import FULL_DISK, MespError


def download(kind: str, repo: str, patterns: list[str], revision: str | None = None) -> Path:
    """The folder with the files of a repository that match `patterns`; its name is the revision.
    By default that is the newest.

    `kind` is ``model`` or ``dataset``. Raises MespError where the repository isn't there, isn't
    open to the user, or can't be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()  # of patterns that no file matches, for one
    if not sys.stderr.isatty():
        disable_progress_bars()
    with _plain_errors(kind, repo):
        return Path(
            snapshot_download(repo, repo_type=kind, allow_patterns=patterns, revision=revision)
        )


def list_files(repo: str, kind: str = "model") -> list[str]:
    """The paths of the files in a repository, without the network of those that were downloaded.
    Raises MespError as `download` does."""
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
    """Turns what the Hub's client raises into a sentence."""
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
    except Exception as error:  # what a broken connection raises differs from library to library
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            raise MespError(f"The disk is full, so {repo} could not be downloaded.") from error
        raise MespError(
            f"{repo} could not be downloaded from the Hugging Face Hub: check the network and try "
            f"again, or give a folder that holds the {kind}."
        ) from error
