"""A model named by its repository on the Hugging Face hub instead of a folder."""

from __future__ import annotations

import re
from pathlib import Path

from rollout_worker.engine import EngineError

REPOSITORY_NAME = re.compile(r"[A-Za-z0-9][-\w.]*(/[A-Za-z0-9][-\w.]*)?")
DOWNLOAD_PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.model",
    "*.jinja",
    "*.txt",
)
"""The files that an engine reads; other formats of the same weights are not downloaded."""


def local_model_folder(model: str, revision: str | None) -> Path:
    """Return the folder of a model; a repository is downloaded first, or found in the hub's cache.

    The token comes from HF_TOKEN, the cache from HF_HOME, a mirror from HF_ENDPOINT.

    Args:
        model: a folder, or a repository such as `Qwen/Qwen3-0.6B` where no such folder exists.
        revision: commit, tag or branch of the repository.

    Raises:
        EngineError: the repository can't be downloaded; the text says why and what to change.
    """
    folder = Path(model)
    if folder.exists() or not REPOSITORY_NAME.fullmatch(model):
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(model, revision=revision, allow_patterns=list(DOWNLOAD_PATTERNS))
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise EngineError(
            f"model {model!r} (revision {revision or 'main'}) is neither a folder nor to be had "
            f"from the hub: {str(error).splitlines()[0]}; check the name, the revision, the token "
            "(HF_TOKEN) and the network"
        ) from error
