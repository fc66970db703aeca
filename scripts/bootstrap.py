"""Makes ``.venv`` on a machine that has python3, git and this clone, and nothing else.

Standard library only, run by whatever ``python3`` is: no pip, no venv module and no compiler are
assumed. The steps: find a Python 3.10 or 3.11, get the pinned uv by hash (locks/bootstrap.txt),
let uv make ``.venv`` and install a hashed lock into it, and this package. A second run finds a
stamp and does nothing.

uv itself comes, in this order: from an earlier run; from PATH when it is the pinned version; from
the package index that is configured (UV_DEFAULT_INDEX, UV_INDEX_URL, PIP_INDEX_URL, pip.conf);
through pip, where some pip is on the machine, from pip's own default index; else through a pip
that apt downloads, unpacked into a temporary folder (no root needed, nothing is installed).
"""

from __future__ import annotations

import configparser
import contextlib
import hashlib
import html.parser
import http.client
import json
import os
import platform
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "locks"
VENV = ROOT / ".venv"
WORK = ROOT / ".venv-bootstrap"
SUPPORTED = ((3, 11), (3, 10))
NEEDED_BYTES = 1_000_000_000

# Exit codes, as in docs/exit-codes.md (this file cannot import the package).
ENVIRONMENT, NETWORK, DISK = 3, 4, 7

CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT")
SYSTEM_CA = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora
)


class BootstrapError(Exception):
    """One line for the user, what to do, and the exit code."""

    def __init__(self, message: str, fix: str, code: int = ENVIRONMENT) -> None:
        super().__init__(message)
        self.fix = fix
        self.code = code


def say(text: str) -> None:
    print(f"[setup] {text}", file=sys.stderr, flush=True)


# --- the interpreter -------------------------------------------------------------------


def require_python() -> None:
    """Go on in a supported Python: this one, or another on PATH (the process is replaced)."""
    if sys.version_info[:2] in SUPPORTED:
        return
    for major, minor in SUPPORTED:
        found = shutil.which(f"python{major}.{minor}")
        # A version manager's shim may be there and not work: ask it.
        if found and answers(found, (major, minor)):
            os.execv(found, [found, *sys.argv])
    own = ".".join(str(part) for part in sys.version_info[:3])
    raise BootstrapError(
        f"Python 3.10 or 3.11 is needed; this is {own} ({sys.executable}) and neither "
        "python3.11 nor python3.10 works on PATH",
        f"install one of them and run: python3.11 {sys.argv[0]}",
    )


def answers(python: str, version: tuple[int, int]) -> bool:
    try:
        said = subprocess.run(
            [python, "-c", "import sys; print(sys.version_info[0], sys.version_info[1])"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return said.stdout.split() == [str(part) for part in version]


# --- one at a time ---------------------------------------------------------------------


@contextlib.contextmanager
def alone():
    """Hold the clone's set-up; a second process waits for the first."""
    import fcntl

    try:
        WORK.mkdir(exist_ok=True)
        handle = (WORK / "lock").open("a")
    except OSError as error:
        raise BootstrapError(
            f"cannot write to this clone, {ROOT}: {error.strerror}",
            "clone it to a folder that you may write to",
        ) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process sets this clone up: waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


# --- certificates and the index --------------------------------------------------------


def ca_file() -> str | None:
    for variable in CA_VARIABLES:
        value = os.environ.get(variable)
        if value and Path(value).is_file():
            return value
    return next((path for path in SYSTEM_CA if Path(path).is_file()), None)


def configured_index() -> str:
    """The package index that this machine is configured for; empty for the tools' own default."""
    for variable in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        value = os.environ.get(variable, "").strip()
        if value:
            return value.rstrip("/")
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    files = [
        os.environ.get("PIP_CONFIG_FILE") or "",
        str(config_home / "pip" / "pip.conf"),
        str(Path.home() / ".pip" / "pip.conf"),
        "/etc/pip.conf",
    ]
    for name in files:
        parser = configparser.RawConfigParser()
        with contextlib.suppress(configparser.Error, OSError, UnicodeDecodeError):
            parser.read(name, encoding="utf-8")
        for section in ("install", "download", "global"):
            value = parser.get(section, "index-url", fallback="").strip()
            if value:
                return value.rstrip("/")
    return ""


def get(url: str, accept: str = "*/*") -> tuple[bytes, str, str]:
    """Body, content type and final address of a page or file; tries five times."""
    context = ssl.create_default_context(cafile=ca_file())
    headers = {"Accept": accept, "User-Agent": "verl-p40-bootstrap"}
    parts = urllib.parse.urlsplit(url)
    if "@" in parts.netloc:
        import base64

        login, _, host = parts.netloc.rpartition("@")
        token = base64.b64encode(urllib.parse.unquote(login).encode()).decode()
        headers["Authorization"] = f"Basic {token}"
        parts = parts._replace(netloc=host)
    shown = urllib.parse.urlunsplit(parts)
    last = ""
    for attempt in range(5):
        try:
            request = urllib.request.Request(shown, headers=headers)
            with urllib.request.urlopen(request, timeout=60, context=context) as response:
                body = response.read()
                kind = response.headers.get("Content-Type", "")
                return body, kind, url if response.geturl() == shown else response.geturl()
        except urllib.error.HTTPError as error:
            last = f"HTTP {error.code}"
            if error.code < 500 and error.code not in (408, 429):
                break
        except (OSError, http.client.HTTPException) as error:
            last = str(getattr(error, "reason", error)) or type(error).__name__
        time.sleep(min(0.5 * 2**attempt, 8))
    raise BootstrapError(
        f"cannot download {shown}: {last}",
        "check the network, the proxy variables, SSL_CERT_FILE and the index address",
        NETWORK,
    )


# --- uv --------------------------------------------------------------------------------


def pinned_uv() -> tuple[str, set[str]]:
    """Version and file hashes of uv in locks/bootstrap.txt."""
    text = (LOCKS / "bootstrap.txt").read_text(encoding="utf-8")
    version = re.search(r"^uv==([0-9.]+)", text, re.MULTILINE)
    if version is None:
        raise BootstrapError("locks/bootstrap.txt does not pin uv", "git checkout locks")
    return version.group(1), set(re.findall(r"sha256:([0-9a-f]{64})", text))


def get_uv() -> str:
    version, hashes = pinned_uv()
    kept = WORK / f"uv-{version}" / "uv"
    if kept.is_file():
        return str(kept)
    there = shutil.which("uv")
    if there and uv_version(there) == version:
        return there
    with tempfile.TemporaryDirectory(dir=WORK, prefix="uv-") as folder:
        index = configured_index()
        wheel = uv_from_index(index, hashes, Path(folder)) if index else None
        if wheel is None:
            wheel = uv_from_pip(Path(folder))
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found not in hashes:
            raise BootstrapError(
                f"{wheel.name}: sha256 is {found}, which locks/bootstrap.txt does not list",
                "the index or a proxy serves another file: use another index (PIP_INDEX_URL)",
                NETWORK,
            )
        unpacked = Path(folder) / "unpacked"
        unpacked.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (n for n in archive.namelist() if n.endswith(".data/scripts/uv"))
            (unpacked / "uv").write_bytes(archive.read(member))
        (unpacked / "uv").chmod(0o755)
        unpacked.rename(kept.parent)
    return str(kept)


def uv_version(uv: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        said = subprocess.run([uv, "--version"], capture_output=True, text=True, timeout=30)
        return said.stdout.split()[1]
    return ""


class Anchors(html.parser.HTMLParser):
    """The links of a PEP 503 page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.links += [value for key, value in attrs if tag == "a" and key == "href" and value]


def uv_from_index(index: str, hashes: set[str], folder: Path) -> Path:
    """Download the wheel for this platform from a simple index, JSON or HTML."""
    say("downloading uv from the configured package index")
    kind = "application/vnd.pypi.simple.v1+json"
    body, content_type, base = get(f"{index}/uv/", f"{kind}, text/html;q=0.1")
    if content_type.startswith(kind):
        listed = [
            (entry["filename"], entry["url"], entry.get("hashes", {}).get("sha256"))
            for entry in json.loads(body)["files"]
        ]
    else:
        anchors = Anchors()
        anchors.feed(body.decode("utf-8", "replace"))
        listed = []
        for link in anchors.links:
            url, _, fragment = link.partition("#")
            name = urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2])
            listed.append((name, url, fragment.partition("sha256=")[2]))
    for name, url, sha256 in listed:
        if sha256 in hashes and name.endswith(".whl") and fits(name):
            target = folder / name
            target.write_bytes(get(urllib.parse.urljoin(base, url))[0])
            return target
    raise BootstrapError(
        "the configured package index has no uv wheel of locks/bootstrap.txt for this platform",
        "use an index that mirrors all files (UV_DEFAULT_INDEX, PIP_INDEX_URL or pip.conf)",
        NETWORK,
    )


def fits(wheel: str) -> bool:
    """Whether a uv wheel's platform tag is ours."""
    machine = platform.machine()
    if sys.platform == "darwin":
        return "macosx" in wheel and machine in wheel
    libc = "manylinux" if platform.libc_ver()[0] == "glibc" else "musllinux"
    return libc in wheel and machine in wheel


def uv_from_pip(folder: Path) -> Path:
    """Let pip download the wheel: it knows its index, and checks the hash as well."""
    pip = find_pip() or pip_from_apt(folder)
    say("downloading uv")
    env = dict(os.environ)
    certificates = ca_file()
    if certificates:
        env.setdefault("PIP_CERT", certificates)
    command = [*pip, "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--require-hashes", "--dest", str(folder)]
    command += ["--requirement", str(LOCKS / "bootstrap.txt")]
    result = subprocess.run(command, env=env, capture_output=True, check=False)
    wheels = list(folder.glob("uv-*.whl"))
    if result.returncode != 0 or not wheels:
        words = result.stderr.decode(errors="replace").strip().splitlines()
        raise BootstrapError(
            f"pip could not download uv: {words[-1] if words else 'no reason given'}",
            "check the network, the proxy variables, SSL_CERT_FILE and PIP_INDEX_URL",
            NETWORK,
        )
    return wheels[0]


def find_pip() -> list[str] | None:
    """A command that runs some pip: a module, or a wheel that Python or Debian keeps around."""
    candidates = [[sys.executable, "-m", "pip"]]
    folders = [
        Path("/usr/share/python-wheels"),
        Path(os.__file__).parent / "ensurepip" / "_bundled",
    ]
    for folder in folders:
        candidates += [[sys.executable, f"{wheel}/pip"] for wheel in folder.glob("pip-*.whl")]
    for candidate in candidates:
        with contextlib.suppress(OSError):
            said = subprocess.run([*candidate, "--version"], capture_output=True)
            if said.returncode == 0:
                return candidate
    return None


def pip_from_apt(folder: Path) -> list[str]:
    """Debian and Ubuntu: apt downloads its pip package (signed), of which we use the wheel.

    Works for any user: with folders of its own, apt neither needs root nor changes the system.
    """
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise BootstrapError(
            "there is no pip on this machine, no apt to get it with, and no package index is "
            "configured",
            "install pip (or uv), or set PIP_INDEX_URL to your package index",
        )
    say("this machine has no pip: apt downloads one into a temporary folder")
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    options = ["-qq", "-o", f"Dir::State::Lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"]
    options += ["-o", "APT::Update::Post-Invoke::=", "-o", "APT::Sandbox::User=root"]
    for step in (["update"], ["download", "python3-pip-whl"]):
        result = subprocess.run(
            ["apt-get", *options, *step], cwd=folder, capture_output=True, text=True
        )
        if result.returncode != 0:
            words = " ".join(result.stderr.split())
            raise BootstrapError(
                f"apt could not download pip: {words}",
                "check the network and apt's sources, or install python3-pip, or set PIP_INDEX_URL",
                NETWORK,
            )
    (package,) = folder.glob("python3-pip-whl_*.deb")
    subprocess.run(["dpkg-deb", "-x", str(package), str(folder / "pip")], check=True)
    (wheel,) = (folder / "pip").glob("usr/share/python-wheels/pip-*.whl")
    return [sys.executable, f"{wheel}/pip"]


# --- .venv -----------------------------------------------------------------------------


def stamp(lock: str) -> str:
    """What an up-to-date ``.venv`` was made from."""
    total = hashlib.sha256()
    for path in (LOCKS / lock, ROOT / "pyproject.toml"):
        total.update(path.read_bytes())
    return f"{lock} {sys.version_info[0]}.{sys.version_info[1]} {total.hexdigest()}"


def is_current(folder: Path, lock: str) -> bool:
    """Whether ``folder`` holds at least ``lock`` (dev.txt holds tool.txt)."""
    wanted = {stamp(lock)} | ({stamp("dev.txt")} if lock == "tool.txt" else set())
    try:
        return (folder / "verl-p40-stamp").read_text() in wanted and answers(
            str(folder / "bin" / "python"), sys.version_info[:2]
        )
    except OSError:
        return False


def uv_environment() -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    certificates = ca_file()
    if certificates:
        env.setdefault("SSL_CERT_FILE", certificates)
    index = configured_index()
    if index:
        env["UV_DEFAULT_INDEX"] = index
    env["UV_PYTHON_DOWNLOADS"] = "never"
    return env


def run_uv(uv: str, *arguments: str) -> None:
    result = subprocess.run(
        [uv, *arguments], env=uv_environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    if result.returncode == 0:
        return
    words = " ".join(result.stderr.split())
    if "No space left" in words:
        raise BootstrapError(f"the disk filled up: {words}", "free some space, run it again", DISK)
    code = NETWORK if re.search(r"fetch|connect|download|network|timed out", words) else ENVIRONMENT
    fix = "check the network and run it again" if code == NETWORK else "see uv's words above"
    raise BootstrapError(f"uv {arguments[0]} failed: {words}", fix, code)


def lock_blocks(lock: str) -> list[tuple[str, str]]:
    """Each package of a lock: its name, and its lines."""
    text = (LOCKS / lock).read_text(encoding="utf-8")
    blocks = re.split(r"\n(?=[A-Za-z0-9])", text)
    return [
        (re.split(r"[=\[ ]", b, maxsplit=1)[0], b) for b in blocks if re.match("[A-Za-z0-9]", b)
    ]


def lock_names(lock: str) -> set[str]:
    return {name for name, _ in lock_blocks(lock)}


def lock_lines(lock: str, names: tuple[str, ...]) -> str:
    """The blocks of a lock for some packages, as a requirement file."""
    return "\n".join(lines for name, lines in lock_blocks(lock) if name in names) + "\n"


def install(uv: str, folder: Path, lock: str) -> None:
    """Install a lock and this package (editable) into an environment, everything by hash."""
    common = ["pip", "install", "--quiet", "--python", str(folder / "bin" / "python")]
    common += ["--no-deps", "--no-build-isolation"]
    with tempfile.TemporaryDirectory(dir=WORK) as scratch:
        # One dependency has no wheel: what builds it comes first, from the same lock.
        first = Path(scratch) / "build.txt"
        first.write_text(lock_lines(lock, ("setuptools",)), encoding="utf-8")
        run_uv(uv, *common, "--require-hashes", "-r", str(first))
    run_uv(uv, *common, "--require-hashes", "-r", str(LOCKS / lock))
    run_uv(uv, *common, "--editable", str(ROOT))


def make(lock: str) -> None:
    """Make or update ``.venv`` so that it holds ``lock`` and this package."""
    if is_current(VENV, lock):
        return
    with alone():
        if is_current(VENV, lock):
            return
        free = shutil.disk_usage(ROOT).free
        if free < NEEDED_BYTES:
            raise BootstrapError(
                f"setting up needs {NEEDED_BYTES / 1e9:.0f} GB on the disk of {ROOT}, "
                f"which has {free / 1e9:.1f} GB free",
                "free some space, run it again",
                DISK,
            )
        uv = get_uv()
        say(f"making .venv from locks/{lock}")
        started = time.monotonic()
        (VENV / "verl-p40-stamp").unlink(missing_ok=True)
        if not answers(str(VENV / "bin" / "python"), sys.version_info[:2]):
            run_uv(uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(VENV))
        install(uv, VENV, lock)
        (VENV / "verl-p40-stamp").write_text(stamp(lock))
        say(f"ready in {time.monotonic() - started:.0f} s")


def start(lock: str, command: list[str]) -> None:
    """Make ``.venv`` and replace this process by a program of it."""
    try:
        require_python()
        make(lock)
    except BootstrapError as error:
        print(f"error: {error}\n  fix: {error.fix}", file=sys.stderr)
        sys.exit(error.code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    program = str(VENV / "bin" / command[0])
    # Without the last, what is imported from .venv is compiled again by every process.
    unset = ("VIRTUAL_ENV", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
    env = {k: v for k, v in os.environ.items() if k not in unset}
    os.execve(program, [program, *command[1:]], env)
