from __future__ import annotations

from pathlib import Path

import pytest
from flaky import QUICK, Site, sha256

from verl_p40.errors import NetworkError
from verl_p40.stack import http, index
from verl_p40.stack.index import SimpleIndex, index_url


@pytest.mark.parametrize("html_only", [False, True], ids=["json", "html"])
def test_files_of_a_project(site: Site, html_only: bool) -> None:
    site.html_only = html_only
    site.publish("torch", "torch-2.6.0+cu118-cp310-cp310-linux_x86_64.whl", b"abc")
    (found,) = SimpleIndex(site.index, http.session(), QUICK).files("Torch")
    assert found.filename == "torch-2.6.0+cu118-cp310-cp310-linux_x86_64.whl"
    assert found.sha256 == sha256(b"abc")
    assert http.session().get(found.url, timeout=5).content == b"abc"
    assert found.size == (None if html_only else 3)


def test_an_unknown_project(site: Site) -> None:
    with pytest.raises(NetworkError, match="HTTP 404"):
        SimpleIndex(site.index, http.session(), QUICK).files("nothing")


def test_a_page_that_is_no_index(site: Site) -> None:
    """A captive portal answers everything with its own JSON."""
    page = site.publish("x", "x-1.tar.gz", b"")
    page.body = b"[]"
    page.content_type = "application/vnd.pypi.simple.v1+json"
    site.resources["/simple/x/"] = page
    with pytest.raises(NetworkError, match="not a package index page"):
        SimpleIndex(site.index, http.session(), QUICK).files("x")


def test_the_first_variable_wins(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/pip/")
    assert index_url("packages") == "http://127.0.0.1:1/pip"
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:1/uv")
    assert index_url("packages") == "http://127.0.0.1:1/uv"


def test_pip_configuration_is_honoured(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir()
    config = home / "pip.conf"
    config.write_text("[global]\ntimeout = 5\nindex-url = http://127.0.0.1:1/from-pip-conf/\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    assert index_url("packages") == "http://127.0.0.1:1/from-pip-conf"


def test_without_any_setting_uv_says_which(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_pip_config_files", list)
    home.mkdir()
    config = home / "uv.toml"
    config.write_text('[[index]]\nurl = "http://127.0.0.1:1/from-uv-toml"\ndefault = true\n')
    monkeypatch.setenv("UV_CONFIG_FILE", str(config))
    assert index_url("packages") == "http://127.0.0.1:1/from-uv-toml"
    monkeypatch.delenv("UV_CONFIG_FILE")
    assert index_url("packages").startswith("https://")


def test_other_indexes_have_documented_defaults(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert index_url("pytorch-cu118").endswith("/whl/cu118")
    monkeypatch.setenv("VERL_P40_TORCH_INDEX", "http://127.0.0.1:1/mirror/")
    assert index_url("pytorch-cu118") == "http://127.0.0.1:1/mirror"


def test_a_certificate_file_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/no/such/bundle.pem")
    with pytest.raises(NetworkError, match="REQUESTS_CA_BUNDLE names a certificate file"):
        http.session()
