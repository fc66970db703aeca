"""GSM8K from a hub, in a stack environment: Hugging Face (or a mirror of it) and ModelScope.

Hugging Face goes through ``huggingface_hub``, so ``HF_ENDPOINT``, ``HF_HOME``, ``HF_TOKEN``,
``HF_HUB_OFFLINE`` and proxies mean what they always mean, and a broken download continues.
ModelScope has no client in the stack; two of its HTTP calls are enough (the ones its own client
makes: ``repo/tree`` and ``repo`` of ``/api/v1/datasets/<owner>/<name>``).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from verl_p40.data import child
from verl_p40.errors import NetworkError

SOURCES: Final = ("hf", "modelscope")

HF_REPOSITORY: Final = "openai/gsm8k"
MODELSCOPE_REPOSITORY: Final = "AI-ModelScope/gsm8k"
"""A copy of the Hugging Face repository, with the same file names."""

FILES: Final = {
    "train": "main/train-00000-of-00001.parquet",
    "test": "main/test-00000-of-00001.parquet",
}

_HF_DEFAULT: Final = "https://huggingface.co"
_MODELSCOPE_DEFAULT: Final = "www.modelscope.cn"
_FIX: Final = (
    "set HF_ENDPOINT to a mirror, or try --source modelscope; without a network, copy the data "
    "set here by other means and run `verl-p40 data gsm8k --local FOLDER`"
)


def download(source: str) -> dict[str, list[Path]]:
    """The files of each split, downloaded or from the cache.

    Raises:
        NetworkError: they cannot be had; the message says from where and why.
    """
    get = _from_hugging_face if source == "hf" else _from_modelscope
    return {split: [get(name)] for split, name in FILES.items()}


def _from_hugging_face(name: str) -> Path:
    import requests
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils import disable_progress_bars

    endpoint = os.environ.get("HF_ENDPOINT") or _HF_DEFAULT
    child.say(f"downloading {name} of {HF_REPOSITORY} from {endpoint}", None)
    disable_progress_bars()
    try:
        return Path(hf_hub_download(HF_REPOSITORY, name, repo_type="dataset"))
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise NetworkError(
                f"HF_HUB_OFFLINE is set and {HF_REPOSITORY} is not in the cache "
                f"({constants.HF_HUB_CACHE})",
                fix="unset HF_HUB_OFFLINE, or give a copy with --local FOLDER",
            ) from error
        raise NetworkError(f"cannot reach {endpoint}: {_cause(error)}", fix=_FIX) from error
    except (GatedRepoError, RepositoryNotFoundError) as error:
        raise NetworkError(
            f"{endpoint} has no public {HF_REPOSITORY}",
            fix="check HF_ENDPOINT and HF_TOKEN, or give a copy with --local FOLDER",
        ) from error
    except (HfHubHTTPError, requests.RequestException) as error:
        raise NetworkError(f"{endpoint}: {_cause(error)}", fix=_FIX) from error


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
    endpoint = (host if "://" in host else f"https://{host}").rstrip("/")
    base = f"{endpoint}/api/v1/datasets/{MODELSCOPE_REPOSITORY}/repo"
    child.say(f"downloading {name} of {MODELSCOPE_REPOSITORY} from {endpoint}", None)
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
