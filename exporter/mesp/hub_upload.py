from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from mesp.bundle.manifest import Manifest, ModelName
from mesp.bundle.model_card import front_matter
from mesp.errors import MespError
from mesp.license import LICENSE_PATTERNS, License, has_license

OF_A_BUNDLE = ["blocks/*", "data/*", "*.mlxfn", "*.bin", "*.json"]
OF_A_BUNDLE += [pattern for pattern in LICENSE_PATTERNS if not pattern.startswith("*")]


def upload(bundle: Path, manifest: Manifest, repo: str) -> str:
    """Uploads a bundle and a model card to the model repository `repo`, and returns the
    repository's address.

    Raises MespError if the upload fails, or if the bundle has no licence.
    """
    from huggingface_hub import HfApi, errors
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    files = [file.path for file in manifest.files]
    check_license(bundle, manifest.model, files)
    try:
        api = HfApi()
        address = api.create_repo(repo, exist_ok=True)
        api.upload_file(path_or_fileobj=card(manifest), path_in_repo="README.md", repo_id=repo)
        api.upload_folder(
            folder_path=bundle,
            repo_id=repo,
            allow_patterns=["manifest.json", *files],
            delete_patterns=OF_A_BUNDLE,
            commit_message=f"Upload {manifest.name}",
        )
    except errors.HFValidationError as error:
        raise MespError(f"{repo} is not a name of a repository: give it as owner/name.") from error
    except errors.LocalTokenNotFoundError as error:
        raise MespError("Log in to the Hugging Face Hub first: `hf auth login`.") from error
    except errors.HfHubHTTPError as error:
        if error.response is not None and error.response.status_code in (401, 403):
            raise MespError(
                f"The Hugging Face Hub does not let you write to {repo}: log in with "
                "`hf auth login`, with a token that may write."
            ) from error
        raise failed(bundle, repo) from error
    except Exception as error:  # libraries raise various errors for a broken connection
        raise failed(bundle, repo) from error
    return str(address)


def check_license(holder: object, model: ModelName | License, files: Iterable[str]) -> None:
    if not has_license(model.license, model.license_name, files):
        raise MespError(
            f"{holder} has no licence, so it is not uploaded; give the model's licence: put its "
            "LICENSE beside config.json and export again."
        )


def failed(bundle: Path, repo: str) -> MespError:
    return MespError(
        f"{bundle} is written, and could not be uploaded to {repo}: check the network and run "
        f"mesp-export --from {bundle} --overwrite --upload {repo}."
    )


def card(manifest: Manifest) -> bytes:
    text = f"""
# {manifest.name} for MeSP

The model, quantized and laid out to be fine-tuned on an iPhone, a Mac or Linux by MeSP.
"""
    return (front_matter(manifest, library_name="mesp") + text).encode()
