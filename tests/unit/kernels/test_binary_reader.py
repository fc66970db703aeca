"""The reader of GPU code, against files that nvcc wrote (binaries/README.md) and damaged copies."""

from __future__ import annotations

import io
import random
import struct
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from verl_p40.errors import DataError, MachineError, UsageError
from verl_p40.kernels import binary, elf, fatbin, lz4
from verl_p40.kernels.capability import Capability, limits
from verl_p40.kernels.inspect import TargetReport, inspect
from verl_p40.kernels.verdict import Verdict, judge
from verl_p40.kernels.view import Damaged, View

BINARIES = Path(__file__).parent / "binaries"
P40 = Capability(6, 1)


def look(path: Path, card: Capability = P40) -> TargetReport:
    return inspect(str(path), card, None, names=True)


def targets(report: TargetReport) -> Counter[str]:
    found: Counter[str] = Counter()
    for file in report.files:
        found.update(file.targets)
    return found


# what `cuobjdump -lelf -lptx` of CUDA 13.5 lists, and nvcc was told
EXPECTED = {
    "cuda118.fatbin": {"sm_60", "sm_61", "compute_61", "sm_70"},
    "cuda118.so": {"sm_60", "sm_61", "compute_61", "sm_70"},
    "none.fatbin": {"sm_60", "compute_60"},
    "rdc.o": {"sm_80"},
    "lto.o": {"sm_60", "lto_70"},
    "cuda130.fatbin": {"sm_75", "compute_75", "sm_90a", "sm_100"},
    "zstd.fatbin": {"sm_80", "compute_80"},
    "sm61.cubin": {"sm_61"},
    "two.ptx": {"compute_61"},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_targets(name: str) -> None:
    assert set(targets(look(BINARIES / name))) == EXPECTED[name]


@pytest.mark.parametrize(
    ("name", "capability", "verdict"),
    [
        ("cuda118.fatbin", "6.1", Verdict.NATIVE),
        ("cuda118.fatbin", "6.0", Verdict.NATIVE),
        ("cuda118.fatbin", "5.2", Verdict.CANNOT),
        ("cuda118.fatbin", "7.5", Verdict.NATIVE),  # sm_70 code, same major version
        ("cuda118.fatbin", "8.6", Verdict.JIT),  # compute_61
        ("cuda118.fatbin", "6.2", Verdict.JIT),  # a Jetson takes no desktop code
        ("cuda118.so", "6.1", Verdict.NATIVE),
        ("cuda130.fatbin", "6.1", Verdict.CANNOT),
        ("cuda130.fatbin", "9.0", Verdict.NATIVE),  # sm_90a
        ("cuda130.fatbin", "8.0", Verdict.JIT),
        ("rdc.o", "6.1", Verdict.CANNOT),
        ("lto.o", "6.1", Verdict.NATIVE),
        ("two.ptx", "6.1", Verdict.JIT),
        ("two.ptx", "6.0", Verdict.CANNOT),
        ("sm61.cubin", "6.1", Verdict.NATIVE),
        ("sm61.cubin", "6.0", Verdict.CANNOT),
    ],
)
def test_verdicts(name: str, capability: str, verdict: Verdict) -> None:
    assert look(BINARIES / name, Capability.parse(capability)).verdict is verdict


@pytest.mark.parametrize("name", ["cuda118.fatbin", "cuda118.so", "cuda130.fatbin", "sm61.cubin"])
def test_kernel_names(name: str) -> None:
    """LZ4-compressed and plain cubins, ABI versions 7 and 8."""
    data = (BINARIES / name).read_bytes()
    for module in binary.modules(View.whole(data)):
        for entry in module.entries:
            if entry.is_code:
                expected = ["newer_only", "scale"] if entry.sm >= 70 else ["scale"]
                assert entry.kernels() == expected, entry.target


def test_a_kernel_that_the_preprocessor_left_out_is_missing() -> None:
    """sm_60 code is there, the kernel is not in it: as with torch's own int4 product."""
    source = View.whole((BINARIES / "cuda118.fatbin").read_bytes())
    module = next(binary.modules(source))
    by_target = {entry.target: entry for entry in module.entries}
    assert by_target["sm_60"].kernels() == ["scale"]
    empty, *_ = next(binary.modules(View.whole((BINARIES / "none.fatbin").read_bytes()))).entries
    assert empty.kernels() == []
    mixed = fatbin.Module(0, "registered", (empty, by_target["sm_70"]))
    report = judge("mixed", 0, [mixed], P40)
    assert (report.missing, report.native) == (1, 0)
    alone = judge("empty", 0, [fatbin.Module(0, "registered", (empty,))], P40)
    assert alone.verdict is Verdict.NO_CODE


def test_zstd_says_what_it_needs_or_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "zstandard", None)
    report = look(BINARIES / "zstd.fatbin", Capability(8, 0)).files[0]
    assert report.verdict is Verdict.NATIVE
    assert "zstandard" in report.kernels[0][2][0]


def test_static_library(tmp_path: Path) -> None:
    members = [(name, (BINARIES / name).read_bytes()) for name in ("rdc.o", "lto.o")]
    archive = b"!<arch>\n"
    for name, data in members:
        archive += f"{name + '/':<16}{0:<12}{0:<6}{0:<6}{'644':<8}{len(data):<10}`\n".encode()
        archive += data + b"\n" * (len(data) % 2)
    library = tmp_path / "lib.a"
    library.write_bytes(archive)
    report = look(library)
    assert set(targets(report)) == {"sm_80", "sm_60", "lto_70"}
    assert report.verdict is Verdict.PARTLY
    library.write_bytes(archive[:-500])
    assert "archive member" in look(library).files[0].problem
    library.write_bytes(archive.replace(b"!<arch>", b"!<thin>"))
    assert "thin archive" in look(library).files[0].problem


def test_wheels_and_tars_are_read_where_they_are(tmp_path: Path) -> None:
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(BINARIES / "cuda118.so", "thing/_C.so")
        archive.write(BINARIES / "cuda130.fatbin", "thing/new.fatbin")
        archive.writestr("thing/__init__.py", "x = 1\n" * 100)
    report = look(wheel)
    assert [(file.name, file.verdict) for file in report.files] == [
        ("thing/_C.so", Verdict.NATIVE),
        ("thing/new.fatbin", Verdict.CANNOT),
    ]
    assert report.verdict is Verdict.PARTLY
    packed = tmp_path / "thing.tar.gz"
    with tarfile.open(packed, "w:gz") as tar:
        tar.add(BINARIES / "cuda118.so", "thing/_C.so")
        tar.add(BINARIES / "README.md", "thing/README.md")
    assert [file.verdict for file in look(packed).files] == [Verdict.NATIVE]
    assert {path.name for path in tmp_path.iterdir()} == {wheel.name, packed.name}


def test_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.so").write_bytes((BINARIES / "cuda118.so").read_bytes())
    (tmp_path / "b.so").symlink_to(tmp_path / "sub" / "a.so")
    (tmp_path / "text.txt").write_text("nothing" * 100)
    assert [file.name for file in look(tmp_path).files] == ["sub/a.so"]
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="no file in there"):
        look(tmp_path / "none")


def test_names_that_are_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        look(tmp_path / "gone.so")
    with pytest.raises(MachineError, match="no training stack"):
        inspect("torch", P40, None)
    (tmp_path / "readme").write_text("hello")
    with pytest.raises(UsageError, match="is no ELF file"):
        look(tmp_path / "readme")
    (tmp_path / "empty.so").touch()
    with pytest.raises(DataError, match="is empty"):
        look(tmp_path / "empty.so")
    (tmp_path / "bad.whl").write_bytes(b"PK\x03\x04 no")
    with pytest.raises(DataError, match="not a readable zip"):
        look(tmp_path / "bad.whl")


@pytest.mark.parametrize("name", ["cuda118.so", "cuda118.fatbin", "sm61.cubin", "cuda130.fatbin"])
def test_cut_off_anywhere_is_one_clear_line(name: str, tmp_path: Path) -> None:
    data = (BINARIES / name).read_bytes()
    broken = tmp_path / name
    for keep in (70, len(data) // 3, len(data) // 2, len(data) - 40):
        broken.write_bytes(data[:keep])
        report = look(broken).files[0]
        assert report.verdict is Verdict.UNREADABLE, keep
        assert "\n" not in report.problem and "byte" in report.problem


def test_random_damage_never_escapes() -> None:
    """Whatever the bytes say, the answer is modules or Damaged, soon."""
    generator = random.Random(61)
    for name in ("cuda118.so", "cuda118.fatbin", "cuda130.fatbin", "rdc.o"):
        original = (BINARIES / name).read_bytes()
        for _ in range(150):
            data = bytearray(original)
            for _ in range(generator.randint(1, 8)):
                data[generator.randrange(len(data))] = generator.randrange(256)
            report = judge(
                name, len(data), binary.modules(View.whole(bytes(data))), P40, names=True
            )
            assert report.verdict in Verdict


def test_damage_inside_a_section_is_not_passed_over() -> None:
    data = bytearray((BINARIES / "cuda118.so").read_bytes())
    section = next(s for s in elf.sections(View.whole(bytes(data))) if s.name == ".nv_fatbin")
    first = fatbin.MAGIC
    at = data.find(first, section.offset)
    data[at : at + 4] = b"\1\2\3\4"
    with pytest.raises(Damaged, match="no fat binary at byte"):
        list(binary.modules(View.whole(bytes(data))))


def test_code_in_ordinary_data_is_found() -> None:
    """As in cuFFT, whose 17,607 fat binaries are in no section of their own."""
    library = (BINARIES / "cuda118.so").read_bytes().replace(b".nv_fatbin\0", b".my_fatbin\0")
    places = {module.place for module in binary.modules(View.whole(library))}
    assert places == {"embedded"}
    report = judge("lib", 0, binary.modules(View.whole(library)), P40)
    assert report.verdict is Verdict.NATIVE
    assert report.embedded_runs


@pytest.mark.parametrize("size", [0, 1, 15, 16, 300, 5000])
def test_lz4_against_blocks_made_by_its_rules(size: int) -> None:
    """Literals alone, and a match that overlaps itself."""
    generator = random.Random(size)
    data = bytes(generator.randrange(256) for _ in range(size))

    def length(value: int) -> tuple[int, bytes]:
        if value < 15:
            return value, b""
        rest = value - 15
        return 15, b"\xff" * (rest // 255) + bytes([rest % 255])

    nibble, extra = length(size)
    assert lz4.decompress(bytes([nibble << 4]) + extra + data, 1 << 20) == data
    # "ab", then size + 4 bytes two back, then the last literals
    match, more = length(size)
    block = bytes([0x20 | match]) + b"ab" + struct.pack("<H", 2) + more + bytes([0x10]) + b"z"
    expected = (b"ab" * (size + 8))[: 2 + size + 4] + b"z"
    assert lz4.decompress(block, 1 << 20) == expected
    assert lz4.decompress(block, 3) == expected[:3]


@pytest.mark.parametrize(
    "block", [b"\xf0", b"\x10", b"\x01a\x09\x00", b"\x10a\x00\x00", b"\x1fa\x01"]
)
def test_lz4_damage(block: bytes) -> None:
    with pytest.raises(Damaged, match="LZ4"):
        lz4.decompress(block, 100)


def test_capabilities() -> None:
    assert Capability.parse("sm_61") == Capability.parse("61") == P40
    assert Capability.parse("10.0").sm == 100
    assert P40.runs_cubin(60) and P40.runs_cubin(61) and not P40.runs_cubin(62)
    assert not P40.runs_cubin(52) and not P40.runs_cubin(70)
    assert P40.runs_ptx(50) and not P40.runs_ptx(70)
    assert Capability(9, 0).runs_cubin(90, specific=True)
    assert not Capability(12, 0).runs_ptx(90, specific=True)
    assert limits(P40).shared_optin == 49_152
    for text in ("6", "six", "6.1.0", "-6.1", ""):
        with pytest.raises(UsageError):
            Capability.parse(text)
    with pytest.raises(UsageError, match="not known"):
        limits(Capability(4, 2))


def test_a_file_object_is_not_needed() -> None:
    assert binary.recognised(io.BytesIO((BINARIES / "two.ptx").read_bytes()).read(200))
    assert not binary.recognised(b"#!/bin/sh\n")
