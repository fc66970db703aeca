"""scripts/bootstrap.py: the first minute on a bare machine. Standard library only."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from flaky import Site, sha256

REPOSITORY = Path(__file__).resolve().parents[3]
UV = "9.9.9"


@pytest.fixture
def boot(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, for a clone in a temporary folder."""
    path = REPOSITORY / "scripts" / "bootstrap.py"
    spec = importlib.util.spec_from_file_location("bootstrap_under_test", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    clone = tmp_path / "clone"
    (clone / "locks").mkdir(parents=True)
    for name, value in {
        "ROOT": clone,
        "LOCKS": clone / "locks",
        "VENV": clone / ".venv",
        "WORK": clone / ".venv-bootstrap",
    }.items():
        monkeypatch.setattr(module, name, value)
    module.WORK.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))  # no pip.conf of this machine's user
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    return module


def uv_wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(f"uv-{UV}.data/scripts/uv", f"#!/bin/sh\necho uv {UV}\n")
        archive.writestr(f"uv-{UV}.data/scripts/uvx", "")
    return buffer.getvalue()


def pin(boot: ModuleType, *hashes: str) -> None:
    lines = " \\\n".join(f"    --hash=sha256:{h}" for h in hashes)
    (boot.LOCKS / "bootstrap.txt").write_text(f"uv=={UV} ; python_version < '3.12' \\\n{lines}\n")


def wheel_name(boot: ModuleType) -> str:
    libc = "manylinux_2_17_" if boot.platform.libc_ver()[0] == "glibc" else "musllinux_1_1_"
    return f"uv-{UV}-py3-none-{libc}{boot.platform.machine()}.whl"


@pytest.fixture
def served(boot: ModuleType, site: Site) -> Site:
    """An index with uv for several platforms; only ours is good."""
    site.publish("uv", f"uv-{UV}-py3-none-win_amd64.whl", b"windows")
    site.publish("uv", f"uv-{UV}-py3-none-manylinux_2_17_s390x.whl", b"mainframe")
    site.publish("uv", wheel_name(boot), uv_wheel())
    pin(boot, sha256(b"windows"), sha256(b"mainframe"), sha256(uv_wheel()))
    return site


@pytest.mark.parametrize("html_only", [False, True], ids=["json", "html"])
def test_uv_by_hash_from_the_configured_index(
    boot: ModuleType, served: Site, html_only: bool
) -> None:
    served.html_only = html_only
    uv = boot.get_uv()
    assert subprocess.run([uv], capture_output=True, text=True, check=True).stdout == f"uv {UV}\n"
    asked = len(served.log)
    assert boot.get_uv() == uv
    assert len(served.log) == asked
    assert [path.name for path in boot.WORK.iterdir()] == [f"uv-{UV}"]


def test_a_server_that_is_busy_for_a_moment(boot: ModuleType, served: Site) -> None:
    served.resources[f"/files/{wheel_name(boot)}"].statuses = [503, 503]
    assert boot.get_uv()


def test_a_connection_that_is_cut(boot: ModuleType, served: Site) -> None:
    served.resources[f"/files/{wheel_name(boot)}"].cuts = [10, 20]
    assert boot.get_uv()


def test_a_wrong_file_under_the_right_hash(boot: ModuleType, served: Site) -> None:
    served.resources[f"/files/{wheel_name(boot)}"].body = b"something else"
    with pytest.raises(boot.BootstrapError) as caught:
        boot.get_uv()
    assert caught.value.code == 4
    assert sha256(b"something else") in str(caught.value)
    assert list(boot.WORK.iterdir()) == []


def test_an_index_without_the_pinned_file(boot: ModuleType, served: Site) -> None:
    pin(boot, "0" * 64)
    with pytest.raises(boot.BootstrapError, match="has no uv wheel of locks") as caught:
        boot.get_uv()
    assert caught.value.code == 4


def test_nobody_listens(boot: ModuleType, served: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    with pytest.raises(
        boot.BootstrapError, match=r"cannot download http://127\.0\.0\.1:9"
    ) as caught:
        boot.get_uv()
    assert caught.value.code == 4


def test_a_uv_on_path_is_used_when_it_is_the_pinned_one(
    boot: ModuleType, served: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    program = folder / "uv"
    program.write_text("#!/bin/sh\necho uv 0.0.1\n")
    program.chmod(0o755)
    assert boot.get_uv() != str(program)
    shutil.rmtree(boot.WORK / f"uv-{UV}")
    program.write_text(f"#!/bin/sh\necho uv {UV}\n")
    assert boot.get_uv() == str(program)


def fake_program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_without_pip_apt_and_index_it_says_what_to_do(
    boot: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin(boot, "0" * 64)
    monkeypatch.setattr(boot, "configured_index", lambda: "")
    monkeypatch.setattr(boot, "find_pip", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(boot.BootstrapError) as caught:
        boot.get_uv()
    assert caught.value.code == 3
    assert "PIP_INDEX_URL" in caught.value.fix


def test_apt_that_has_no_network(
    boot: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin(boot, "0" * 64)
    monkeypatch.setattr(boot, "configured_index", lambda: "")
    monkeypatch.setattr(boot, "find_pip", lambda: None)
    fake_program(tmp_path / "bin", "apt-get", "echo E: Could not resolve host >&2; exit 100")
    fake_program(tmp_path / "bin", "dpkg-deb", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    with pytest.raises(boot.BootstrapError, match="apt could not download pip: E: Could not") as c:
        boot.get_uv()
    assert c.value.code == 4


def run_in(python_info: str, path: str, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    """scripts/train.py in this interpreter, which claims to be another version.

    ``path`` must not lead to a real Python: it would go on there, and train.
    """
    code = (
        "import sys, runpy\n"
        f"sys.version_info = {python_info}\n"
        f"sys.argv = [{str(REPOSITORY / 'scripts' / 'train.py')!r}]\n"
        f"sys.path.insert(0, {str(REPOSITORY / 'scripts')!r})\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": path, "HOME": str(cwd)},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_unsupported_python_without_another(tmp_path: Path) -> None:
    # a version manager's shim is there, but does not work
    fake_program(tmp_path / "bin", "python3.11", "echo no version set >&2; exit 127")
    done = run_in("(3, 12, 1)", str(tmp_path / "bin"), cwd=tmp_path)
    assert done.returncode == 3
    error, fix = done.stderr.splitlines()
    assert re.fullmatch(
        r"error: Python 3\.10 or 3\.11 is needed; this is 3\.12\.1 \(.*\) .*", error
    )
    assert "python3.11" in fix


def test_an_unsupported_python_goes_on_in_another(tmp_path: Path) -> None:
    fake_program(
        tmp_path / "bin", "python3.10", 'if [ "$1" = -c ]; then echo 3 10; else echo "ran $1"; fi'
    )
    done = run_in("(3, 13, 0)", str(tmp_path / "bin"), cwd=tmp_path)
    assert done.stdout == f"ran {REPOSITORY / 'scripts' / 'train.py'}\n"


def test_an_ancient_python_gets_a_sentence(tmp_path: Path) -> None:
    done = run_in("(3, 5, 2)", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: Python 3.10 or 3.11 is needed")


@pytest.fixture
def recorded(boot: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands for uv: writes down what it is asked, and makes a folder that looks like a venv."""
    for name in ("tool.txt", "dev.txt"):
        shutil.copy(REPOSITORY / "locks" / name, boot.LOCKS / name)
    (boot.ROOT / "pyproject.toml").write_text("[project]\n")
    calls: list[str] = []

    def run_uv(uv: str, *arguments: str) -> None:
        calls.append(arguments[0])
        if arguments[0] == "venv":
            (boot.VENV / "bin").mkdir(parents=True)
            (boot.VENV / "bin" / "python").symlink_to(sys.executable)

    monkeypatch.setattr(boot, "run_uv", run_uv)
    monkeypatch.setattr(boot, "get_uv", lambda: "uv")
    return calls


def test_a_second_run_does_nothing_until_the_lock_changes(
    boot: ModuleType, recorded: list[str]
) -> None:
    boot.make("tool.txt")
    assert recorded == ["venv", "pip", "pip", "pip"]
    boot.make("tool.txt")
    assert len(recorded) == 4
    boot.make("dev.txt")
    assert recorded[4:] == ["pip", "pip", "pip"], "the environment is kept, dev is added"
    boot.make("tool.txt")
    assert len(recorded) == 7, "dev holds tool"
    (boot.ROOT / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    boot.make("tool.txt")
    assert len(recorded) == 10


def test_the_command_gets_the_users_own_path(
    boot: ModuleType, recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With .venv/bin on it, the command would name itself as this shell cannot find it."""
    started: list[tuple[str, dict[str, str]]] = []
    monkeypatch.setattr(
        boot.os, "execve", lambda program, arguments, env: started.append((program, env))
    )
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    boot.start("tool.txt", ["verl-p40", "train"])
    ((program, env),) = started
    assert program == str(boot.VENV / "bin" / "verl-p40")
    assert env["PATH"] == "/usr/bin:/bin"
    assert "PYTHONDONTWRITEBYTECODE" not in env


def test_an_interrupted_set_up_is_not_taken_for_done(
    boot: ModuleType, recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    boot.make("tool.txt")

    def broken(uv: str, *arguments: str) -> None:
        raise boot.BootstrapError("uv pip failed", "", 4)

    with monkeypatch.context() as patch:
        patch.setattr(boot, "run_uv", broken)
        with pytest.raises(boot.BootstrapError):
            boot.make("dev.txt")
    assert not boot.is_current(boot.VENV, "tool.txt")


def test_too_little_disk(
    boot: ModuleType, recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boot, "NEEDED_BYTES", 10**18)
    with pytest.raises(boot.BootstrapError, match=r"which has \d+\.\d GB free") as caught:
        boot.make("tool.txt")
    assert caught.value.code == 7
    assert recorded == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_clone(boot: ModuleType, recorded: list[str]) -> None:
    shutil.rmtree(boot.WORK)
    boot.ROOT.chmod(0o555)
    try:
        with pytest.raises(boot.BootstrapError, match="cannot write to this clone") as caught:
            boot.make("tool.txt")
    finally:
        boot.ROOT.chmod(0o755)
    assert caught.value.code == 3


def test_a_clone_that_cannot_be_written(boot: ModuleType, recorded: list[str]) -> None:
    """As above, in a way that stops root too: a file stands where the folder should be."""
    shutil.rmtree(boot.WORK)
    boot.WORK.write_text("")
    with pytest.raises(boot.BootstrapError, match="cannot write to this clone") as caught:
        boot.make("tool.txt")
    assert caught.value.code == 3


def test_uv_gets_the_machines_index_and_certificates(
    boot: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("")
    for name in boot.CA_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CERT", str(bundle))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    made = boot.uv_environment()
    assert made["SSL_CERT_FILE"] == str(bundle)
    assert made["UV_DEFAULT_INDEX"] == "http://127.0.0.1:9/simple"
    assert made["UV_PYTHON_DOWNLOADS"] == "never"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("error: Failed to fetch: `http://h/simple/x/`", 4),
        ("error: No space left on device (os error 28)", 7),
        ("error: the interpreter is broken", 3),
    ],
)
def test_what_uv_says_becomes_an_exit_code(
    boot: ModuleType, tmp_path: Path, words: str, code: int
) -> None:
    fake_program(tmp_path / "bin", "uv", f"echo '{words}' >&2; exit 2")
    with pytest.raises(boot.BootstrapError, match=re.escape(words)) as caught:
        boot.run_uv(str(tmp_path / "bin" / "uv"), "pip")
    assert caught.value.code == code


def test_the_exit_codes_are_the_documented_ones(boot: ModuleType) -> None:
    from verl_p40.errors import ExitCode

    assert (boot.ENVIRONMENT, boot.NETWORK, boot.DISK) == (
        ExitCode.ENVIRONMENT,
        ExitCode.NETWORK,
        ExitCode.DISK,
    )


def test_the_build_backend_needs_come_from_the_lock(boot: ModuleType) -> None:
    shutil.copy(REPOSITORY / "locks" / "tool.txt", boot.LOCKS / "tool.txt")
    text = boot.lock_lines("tool.txt", ("setuptools",))
    assert text.startswith("setuptools==80.9.0")
    assert text.count("==8") == 1
    assert "--hash=sha256:" in text


def test_it_needs_the_standard_library_alone() -> None:
    """Run isolated from site-packages, as on a bare machine."""
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY / 'scripts')!r}); import bootstrap"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
