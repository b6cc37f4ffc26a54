"""Repositories of the Hub: fetch one, upload a folder, and find the origin that the name of a checkpoint stands for."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.files.card_metadata import README, TERMS, Folder, Origin
from pt2mx.pt2e.files.user_errors import one_line
from pt2mx.version import __version__

#: a name of the Hub with its owner
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
#: a folder in the cache of the Hub
_CACHED = re.compile(r"models--([^/]+)/snapshots/\w+")
#: the files of a quantized model; a repository of floats has larger ones
_FILES = ("*.json", "*.jinja", "*.md", "*.model", "*.pt2", "*.txt", "*.yaml", *TERMS)
#: machine code for the processors of another machine
_PACKAGES = "*.aoti.pt2"
#: exceptions of huggingface_hub's client, httpx, which are no ConnectionError
_NO_CONNECTION = ("ConnectError", "ConnectTimeout", "ReadTimeout")
_LOG_IN = "log in by `hf auth login`, or give token="
_CLIENT = {"library_name": "pt2mx", "library_version": __version__}


def is_repository(name: object) -> bool:
    """Return True for a name of the Hub, `owner/name`, that is no path of this machine."""
    return isinstance(name, str) and bool(_NAME.fullmatch(name)) and not os.path.exists(name)


def fetch(name: str, revision: str | None = None, **options: Any) -> Path:
    """Return the folder in the cache of the Hub with the files of a quantized model; fetch those that it lacks.

    Args:
        name: the repository.
        revision: its branch, tag or commit; None: the main branch.
        **options: `token`, `cache_dir` and `local_files_only` of `huggingface_hub.snapshot_download`.

    Raises:
        MXError: for a repository or a revision that is not there, or that the token does not open; without a
            connection, for one that is not in the cache.
    """
    with _errors_of_hub(name, f"could not fetch the repository {name!r} of the Hub"):
        hub = import_extra("huggingface_hub", "hf")
        files = {"allow_patterns": _FILES, "ignore_patterns": _PACKAGES}
        return Path(hub.snapshot_download(name, revision=revision, **files, **_CLIENT, **options))


def make_repository(name: str, private: bool | None, token: bool | str | None, revision: str | None) -> str:
    """Make a repository, and a branch, where they are missing; return its name with the owner.

    Raises:
        MXError: where the Hub cannot be reached, or refuses the name or the token.
    """
    with _errors_of_hub(name, f"could not make the repository {name!r} of the Hub"):
        api = import_extra("huggingface_hub", "hf").HfApi(token=token, **_CLIENT)
        repository: str = api.create_repo(name, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(repository, branch=revision, exist_ok=True)
        return repository


def upload(folder: Folder, repository: str, token: bool | str | None, **options: Any) -> Any:
    """Upload the files of a folder to a repository; return the commit.

    Raises:
        MXError: where the Hub cannot be reached, or refuses the token.
    """
    with _errors_of_hub(repository, f"could not upload to the repository {repository!r} of the Hub"):
        api = import_extra("huggingface_hub", "hf").HfApi(token=token, **_CLIENT)
        return api.upload_folder(repo_id=repository, folder_path=folder, **options)


@contextmanager
def _errors_of_hub(name: str, what: str) -> Iterator[None]:
    """Raise an `MXError` for any exception of the block; `what` is the message where none of its own is known."""
    errors = import_extra("huggingface_hub.errors", "hf")
    known = {
        errors.GatedRepoError: f"the repository {name!r} of the Hub is gated: ask on its page for access; {_LOG_IN}",
        errors.RepositoryNotFoundError: f"there is no folder {name!r}, and no repository of the Hub that this token "
        f"opens: check the name; for a private one {_LOG_IN}",
        errors.RevisionNotFoundError: f"the repository {name!r} of the Hub has no such revision: give one of its "
        "branches, tags or commits",
        errors.LocalEntryNotFoundError: f"there is no folder {name!r}, and no such repository in the cache of the Hub, "
        f"which cannot be reached: `hf download {name}` fetches it where it can, or give a folder",
    }
    try:
        yield
    except MXError:
        raise
    except Exception as error:  # also of the connection
        texts = (text for kind, text in known.items() if isinstance(error, kind))
        is_offline = isinstance(error, ConnectionError) or type(error).__name__ in _NO_CONNECTION
        offline = "it cannot be reached: check the connection, and that HF_HUB_OFFLINE is not set"
        unknown = offline if is_offline else f"{one_line(error)}; {_LOG_IN} for one that is yours"
        raise MXError(next(texts, f"{what}: {unknown}")) from error


def origin_of(name: str | os.PathLike[str]) -> Origin | None:
    """Return the model that a folder, a GGUF file or a name of the Hub stands for; None for none of these.

    Of a name of the Hub it fetches the README.md and the terms, as far as the Hub can be reached.
    """
    text = os.fspath(name)
    if os.path.exists(text):
        path = Path(os.path.abspath(text))
        cached = _CACHED.search(path.as_posix())
        known = cached[1].replace("--", "/") if cached else path.name
        return Origin(known, cached is not None, path if path.is_dir() else path.parent)
    if is_repository(text):
        return Origin(text, True, _documents(text))
    return Origin(text, False, None) if text and "/" not in text else None


class _Silent(tqdm):
    """A progress bar that prints nothing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})


def _documents(name: str) -> Path | None:
    hub = import_extra("huggingface_hub", "hf")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=[README, *TERMS], tqdm_class=_Silent, **_CLIENT))
    except Exception:  # of the connection, or of a name that is none: the model was loaded, and the card says less
        return None
