"""Downloads from a hub, in a stack environment: Hugging Face (or a mirror of it) and ModelScope.

Hugging Face goes through ``huggingface_hub``, so ``HF_ENDPOINT``, ``HF_HOME``, ``HF_TOKEN``,
``HF_HUB_OFFLINE`` and proxies mean what they always mean, and a broken download continues.
ModelScope has no client in the stack; two of its HTTP calls are enough (the ones its own client
makes: ``repo/tree`` and ``repo`` of ``/api/v1/datasets/<owner>/<name>``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import urlencode

from verl_p40.data import child
from verl_p40.errors import DataError, NetworkError, VerlP40Error

SOURCES: Final = ("hf", "modelscope")

HF_REPOSITORY: Final = "openai/gsm8k"
MODELSCOPE_REPOSITORY: Final = "AI-ModelScope/gsm8k"
"""A copy of the Hugging Face repository, with the same file names."""

FILES: Final = {
    "train": "main/train-00000-of-00001.parquet",
    "test": "main/test-00000-of-00001.parquet",
}

_WAITS: Final = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each further attempt at a download that broke off."""

_HF_DEFAULT: Final = "https://huggingface.co"
_MODELSCOPE_DEFAULT: Final = "www.modelscope.cn"


class _Words(NamedTuple):
    """What is said of a repository that cannot be had. ``absent``: how its absence is classed."""

    copy: str
    fix: str
    absent: type[VerlP40Error]


_WORDS: Final = {
    "dataset": _Words(
        "give a copy with --local FOLDER",
        "set HF_ENDPOINT to a mirror, or try --source modelscope; without a network, copy the data "
        "set here by other means and run `verl-p40 data gsm8k --local FOLDER`",
        NetworkError,
    ),
    "model": _Words(
        "put a copy into the folder VERL_P40_MODELS names (models/OWNER/NAME)",
        "set HF_ENDPOINT to a mirror; without a network, copy the model's files to "
        "$VERL_P40_MODELS/OWNER/NAME (models/OWNER/NAME) by other means",
        DataError,
    ),
}


def download(source: str) -> dict[str, list[Path]]:
    """The files of each split, downloaded or from the cache.

    Raises:
        NetworkError: they cannot be had; the message says from where and why.
    """
    get = _from_hugging_face if source == "hf" else _from_modelscope
    return {split: [get(name)] for split, name in FILES.items()}


def _from_hugging_face(name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    child.say(f"downloading {name} of {HF_REPOSITORY} from {endpoint()}", None)
    disable_progress_bars()
    with explained(HF_REPOSITORY, "dataset"):
        return patiently(lambda: Path(hf_hub_download(HF_REPOSITORY, name, repo_type="dataset")))


def patiently(get: Callable[[], Path]) -> Path:
    """Go on with a download that breaks off: the client itself gives up at the first."""
    import requests
    from requests.exceptions import ChunkedEncodingError

    for wait in _WAITS:
        try:
            return get()
        except (requests.ConnectionError, requests.Timeout, ChunkedEncodingError) as error:
            child.say(f"the download broke off ({_cause(error)}): going on in {wait:.0f} s", None)
            time.sleep(wait)
    return get()


def endpoint() -> str:
    """The hub, or the mirror that ``HF_ENDPOINT`` names."""
    return os.environ.get("HF_ENDPOINT") or _HF_DEFAULT


@contextmanager
def explained(repository: str, kind: Literal["dataset", "model"]) -> Iterator[None]:
    """Turn what the hub's client raises into one line of ours.

    Raises:
        NetworkError: the hub cannot be reached, refuses, or is not to be asked.
        DataError: it has no such model (or not for everybody).
    """
    import requests
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    where, words = endpoint(), _WORDS[kind]
    try:
        yield
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        if constants.HF_HUB_OFFLINE:
            raise NetworkError(
                f"HF_HUB_OFFLINE is set and {repository} is not in the cache "
                f"({constants.HF_HUB_CACHE})",
                fix=f"unset HF_HUB_OFFLINE, or {words.copy}",
            ) from error
        raise NetworkError(f"cannot reach {where}: {_cause(error)}", fix=words.fix) from error
    except (GatedRepoError, RepositoryNotFoundError, HFValidationError) as error:
        raise words.absent(
            f"{where} has no public {repository}",
            fix=f"check HF_ENDPOINT and HF_TOKEN, or {words.copy}",
        ) from error
    except (requests.ConnectionError, requests.Timeout) as error:
        raise NetworkError(f"cannot reach {where}: {_cause(error)}", fix=words.fix) from error
    except (HfHubHTTPError, requests.RequestException) as error:
        answer = getattr(error, "response", None)
        if answer is not None and answer.status_code in (401, 403, 404):
            # As the above, from a mirror that leaves out the hub's own error code.
            raise words.absent(
                f"{where} has no public {repository}",
                fix=f"check HF_ENDPOINT and HF_TOKEN, or {words.copy}",
            ) from error
        raise NetworkError(f"{where}: {_cause(error)}", fix=words.fix) from error


def _cause(error: BaseException) -> str:
    """The first words of the innermost cause: what a person can act on."""
    from verl_p40.stack import http

    inner: BaseException = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    if isinstance(inner, Exception):
        import requests

        if isinstance(inner, requests.ConnectionError):
            return http.explain(inner)
    words = " ".join(str(inner).split())
    return words[:200] or type(inner).__name__


def _from_modelscope(name: str) -> Path:
    from verl_p40.stack import fetch, http
    from verl_p40.stack.download import download as fetch_file

    host = os.environ.get("MODELSCOPE_DOMAIN") or _MODELSCOPE_DEFAULT
    site = (host if "://" in host else f"https://{host}").rstrip("/")
    base = f"{site}/api/v1/datasets/{MODELSCOPE_REPOSITORY}/repo"
    child.say(f"downloading {name} of {MODELSCOPE_REPOSITORY} from {site}", None)
    session = http.session()
    entry = _modelscope_entry(session, base, name)
    query = urlencode({"Source": "SDK", "Revision": "master", "FilePath": name})
    target = fetch.cached_path(entry["Sha256"], Path(name).name)
    done = 0

    def on_bytes(size: int) -> None:
        nonlocal done
        done += size
        child.say(f"downloading {name}", done / entry["Size"] if entry.get("Size") else None)

    fetch_file(f"{base}?{query}", target, entry["Sha256"], session, on_bytes=on_bytes)
    return target


def _modelscope_entry(session: Any, base: str, name: str) -> dict[str, Any]:
    """What ModelScope says of a file: at least ``Path`` and ``Sha256``."""
    import requests

    from verl_p40.stack import http
    from verl_p40.stack.http import RetryPolicy

    query = urlencode({"Revision": "master", "Root": str(Path(name).parent), "PageSize": 100})
    fix = "try --source hf, or give a copy with --local FOLDER"
    try:
        response = session.get(f"{base}/tree?{query}", timeout=RetryPolicy().timeout)
        response.raise_for_status()
        files = response.json()["Data"]["Files"]
        entry = next((f for f in files if f["Path"] == name), None)
    except requests.RequestException as error:
        raise NetworkError(f"{http.redact(base)}: {http.explain(error)}", fix=fix) from error
    except (ValueError, KeyError, TypeError) as error:
        raise NetworkError(f"{http.redact(base)}/tree gave an unknown answer", fix=fix) from error
    if entry is None or not entry.get("Sha256"):
        raise NetworkError(f"{http.redact(base)} does not list {name} with a sha256", fix=fix)
    return dict(entry)
