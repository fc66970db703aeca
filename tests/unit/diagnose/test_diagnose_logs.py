"""Logs as they really are: colours, bars, prefixes, several workers, any size, damage."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Iterator

import pytest

from verl_p40.diagnose import Diagnosis, diagnose_chunks, diagnose_lines
from verl_p40.diagnose.text import clean

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB."
STEP = "(TaskRunner pid=77) step:{} - critic/score/mean:0.5 - timing_s/gen:5.3 - perf/mfu:0.1"


def kinds(diagnosis: Diagnosis) -> list[str]:
    return [cause.kind for cause in diagnosis.causes]


@pytest.mark.parametrize(
    ("line", "text", "source"),
    [
        ("\x1b[36m(WorkerDict pid=12, ip=192.0.2.1)\x1b[0m boom", "boom", "WorkerDict pid=12, ip=192.0.2.1"),
        ("train-1  | (EngineCore_0 pid=7) boom", "boom", "train-1 EngineCore_0 pid=7"),
        ("(W pid=1) boom [repeated 3x across cluster] (Ray deduplicates logs)", "boom", "W pid=1"),
        ("[rank0]: boom", "boom", "rank0"),
        ("ERROR 06-06 14:09:57 worker_base.py:148] boom", "boom", ""),
        ("ERROR 10-25 13:08:43 [core.py:708]     boom", "    boom", ""),
        ("E0912 11:54:57.366000 1121181 torch/_inductor/x.py:2100] [7/0] boom", "boom", ""),
        ("2025-07-03T14:20:51.565839352Z boom", "boom", ""),
        ("bo\x00om\r", "boom", ""),
        ("#12 34.56 boom", "boom", ""),
        ("2025-10-31 03:11:02,475 - Trainer - INFO - [rank7]: boom", "boom", "rank7"),
        ("[2025-05-10 00:18:27] (raylet) boom", "(raylet) boom", ""),
        ("server-1  |     |   frame", "  frame", "server-1"),
        ("│ ERROR 09-27 06:46:46 engine.py:157] boom          │", "boom", ""),
        ("    frame", "    frame", ""),
        ("2024-09-17T15:04:01.101Z stderr F boom", "boom", ""),
        ("Aug 26 14:08:07 host python3[1234]: boom", "boom", ""),
        ("2024-09-17 15:04:01.101 | ERROR    | verl.main:run:12 - boom", "boom", ""),
        ("[2024-09-17 15:04:01,101][__main__][ERROR] - boom", "boom", ""),
        ("[ERROR|trainer.py:12] 2024-09-17 15:04:01,101 >> boom", "boom", ""),
        ("!!! Exception during processing !!! boom", "boom", ""),
        ("E       KeyError: 'boom'", "KeyError: 'boom'", ""),
        ("[Bug]: KeyError: 'boom'", "KeyError: 'boom'", ""),
        ("ERROR: the boom: KeyError", "ERROR: the boom: KeyError", ""),
    ],
)  # fmt: skip
def test_what_others_put_in_front_is_taken_off(line: str, text: str, source: str) -> None:
    cleaned = clean(line)
    assert (cleaned.text, cleaned.source) == (text, source)


DRESSES = {
    "plain": "{}\n",
    "windows": "{}\r\n",
    "colours": "\x1b[31m{}\x1b[0m\n",
    "bar": "Training:  12%|#2   | 12/100\rTraining:  13%|#3   | 13/100\r{}\n",
    "bar after": "{}\rTraining:  13%|#3   | 13/100\n",
    "ray": "\x1b[36m(WorkerDict pid=4)\x1b[0m {} [repeated 3x across cluster]\n",
    "compose": "train-1  | {}\n",
    "rank": "[rank0]: {}\n",
    "logger": "ERROR 06-06 14:09:57 [worker_base.py:148] {}\n",
    "no end": "{}",
}


@pytest.mark.parametrize("dress", DRESSES.values(), ids=list(DRESSES))
@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (OOM, "cuda-oom"),
        ("RuntimeError: FlashAttention only supports Ampere GPUs or newer.", "flash-attn-arch-unsupported"),
        ("RuntimeError: GPUs with compute capability below 7.0 are not supported.", "vllm-cc-below-minimum"),
    ],
)  # fmt: skip
def test_however_it_is_dressed(dress: str, line: str, kind: str) -> None:
    raw = ("starting\n" + dress.format(line)).encode()
    assert kinds(diagnose_chunks([raw])) == [kind]


def test_damage_does_not_hide_the_error() -> None:
    raw = b"\xff\xfe\x00 half a line \x00\n" + OOM.encode() + b"\n\xc3\x28 rest"
    diagnosis = diagnose_chunks([raw[i : i + 7] for i in range(0, len(raw), 7)])
    assert kinds(diagnosis) == ["cuda-oom"]
    assert diagnosis.causes[0].line == 2


def test_line_numbers_hold_in_a_long_log() -> None:
    clean_lines = "".join(f"INFO epoch {n} token {n * 7}\n" for n in range(200_000))
    raw = (clean_lines + OOM + "\n").encode()
    chunks = [raw[i : i + 65536] for i in range(0, len(raw), 65536)]
    diagnosis = diagnose_chunks(chunks)
    assert diagnosis.causes[0].line == 200_001
    assert diagnosis.lines == 200_001


MISSING = "ModuleNotFoundError: No module named 'vllm._C'"


@pytest.mark.parametrize(
    "pasted",
    [
        MISSING.replace("'", "\u2019"),
        MISSING.replace("'", '"'),
        MISSING.replace("'", "&#39;"),
        f"stderr: {MISSING}",
        f"94  {MISSING}",
        json.dumps({"log": f"{MISSING}\n", "stream": "stderr", "time": "2026-11-30T10:00:00Z"}),
        json.dumps({"log": f"Traceback (most recent call last):\n  import vllm._C\n{MISSING}\n"}),
    ],
    ids=["typographic", "other quotes", "html", "stderr", "numbered", "docker", "json"],
)
def test_an_error_as_forums_viewers_and_json_spell_it(pasted: str) -> None:
    assert kinds(diagnose_lines([pasted])) == ["vllm-abi"]


def test_a_folder_of_windows_is_no_line_end() -> None:
    line = "OSError: [Errno 28] No space left on device: 'C:\\new\\nets\\node'"
    (cause,) = diagnose_lines([line]).causes
    assert cause.evidence[0].text == line


def test_an_out_of_memory_without_frames_takes_those_of_the_next_rank() -> None:
    cut = [
        OOM,
        "Traceback (most recent call last):",
        '  File "train.py", line 184, in <module>',
        "    optimizer.step()",
        '  File "/env/zero/low_level_optim.py", line 480, in step',
    ]
    assert kinds(diagnose_lines(cut)) == ["cuda-oom-optimizer"]
    assert kinds(diagnose_lines([*cut, "ValueError: another one's"])) == ["cuda-oom"]


def test_every_line_of_a_pasted_excerpt_is_searched() -> None:
    """It has no telling word, which among thousands of lines it would need."""
    line = "the rest of the memory reserved for KV Cache is -1.29GiB."
    assert kinds(diagnose_lines([line])) == ["vllm-kv-cache-none"]
    assert kinds(diagnose_lines([line, *(f"token {n}" for n in range(500))])) == []


def test_memory_is_bounded() -> None:
    """10 MB of a log with an error now and then are read in little memory."""

    def chunks() -> Iterator[bytes]:
        for block in range(12):
            lines = [STEP.format(block * 9000 + n) for n in range(9000)]
            lines[100] = "WARNING: failed to report metrics, retrying"
            yield "\n".join(lines).encode() + b"\n"

    tracemalloc.start()
    diagnosis = diagnose_chunks(chunks())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert diagnosis.size > 8_000_000
    assert peak < 8_000_000
    assert kinds(diagnosis) == []


def test_a_line_without_an_end_is_cut() -> None:
    bar = b"\rTraining:  13%|#3   | 13/100" * 200_000
    diagnosis = diagnose_chunks(
        [bar[i : i + (1 << 16)] for i in range(0, len(bar), 1 << 16)] + [b"\n" + OOM.encode()]
    )
    assert kinds(diagnosis) == ["cuda-oom"]


def test_an_error_followed_by_steps_was_harmless() -> None:
    log = [OOM, *(STEP.format(n) for n in range(1, 5))]
    diagnosis = diagnose_lines(log)
    assert kinds(diagnosis) == []
    assert diagnosis.result == "harmless"
    assert "training went on" in diagnosis.harmless[0].why


def test_a_step_that_ray_hands_on_late_forgives_nothing() -> None:
    """The main process had ended: a run of ours, where the last step's line came after the error."""
    step = "(TaskRunner pid=7) step:{} - actor/entropy:4.5 - critic/score/mean:0.1"
    error = (
        "Error executing job with overrides: []",
        "Traceback (most recent call last):",
        '  File "/env/verl/workers/actor/dp_actor.py", line 190, in compute_log_prob',
        "    entropy, log_probs = self._forward_micro_batch(micro_batch)",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB.",
    )
    late = diagnose_lines([step.format(3), *error, step.format(4)])
    assert late.causes[0].kind.startswith("cuda-oom")
    assert late.progress == 1
    again = [
        "INFO worker.py:1879 -- Started a local Ray instance.",
        *(step.format(number) for number in range(4, 9)),
    ]
    assert diagnose_lines([step.format(3), *error, *again]).causes == ()


def test_an_error_that_comes_again_after_the_steps_is_the_cause() -> None:
    log = [OOM, *(STEP.format(n) for n in range(1, 5)), OOM]
    assert kinds(diagnose_lines(log)) == ["cuda-oom-after-steps"]


def test_a_crash_after_the_last_step_of_what_was_said_before() -> None:
    """Ray may print a step after the worker's error; the driver's end still tells that it died."""
    log = [OOM, STEP.format(1), "ray.exceptions.ActorDiedError: The actor died unexpectedly"]
    assert kinds(diagnose_lines(log)) == ["cuda-oom"]


def test_interleaved_workers_keep_their_own_frames() -> None:
    log = [
        '(WorkerDict pid=1)   File "/env/verl/utils/torch_functional.py", line 144, in entropy_from_logits',
        '(WorkerDict pid=2)   File "/env/torch/optim/adamw.py", line 608, in _multi_tensor_adamw',
        f"(WorkerDict pid=1) {OOM}",
    ]
    assert kinds(diagnose_lines(log)) == ["cuda-oom-logits"]


def test_the_first_error_of_a_chain_is_the_cause() -> None:
    log = """\
Traceback (most recent call last):
  File "/env/a.py", line 1, in f
ImportError: /env/flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/env/b.py", line 1, in g
RuntimeError: Failed to import transformers.models.qwen2.modeling_qwen2 because of the following error
ModuleNotFoundError: No module named 'nonsense'
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
"""
    diagnosis = diagnose_lines(log.splitlines())
    assert kinds(diagnosis) == ["flash-attn-abi"]
    assert {"sigkill-suspected"} <= {finding.kind for finding in diagnosis.symptoms}


def test_a_statement_in_a_traceback_is_not_the_error() -> None:
    log = """\
Traceback (most recent call last):
  File "/env/a.py", line 1, in f
    raise TripwireError("No space left on device") if x else ValueError("boom")
ValueError: something of our own
RuntimeError: CUDA error: no kernel image is available for execution on the device
"""
    assert kinds(diagnose_lines(log.splitlines())) == ["no-kernel-image"]


def test_two_independent_faults_are_told_in_order() -> None:
    log = [
        "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. "
        "Your Tesla P40 GPU has compute capability 6.1.",
        *["unrelated"] * 300,
        "OSError: [Errno 28] No space left on device",
    ]
    assert kinds(diagnose_lines(log)) == ["bf16-unsupported", "disk-full"]


SHARED_MEMORY = {
    "triton-shared-memory": "OutOfResources: out of resource: shared memory, Required: 81920, Hardware limit: 49152.",
    "flash-attn-shared-memory": "RuntimeError: FlashAttention backward for head dim > 64 requires A100 or H100 "
    "GPUs as the implementation needs a large amount of shared memory.",
    "dataloader-shm": "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient "
    "shared memory (shm).",
    "nccl-shm": "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-a (size 9637888)",
    "ray-object-store": "ray.exceptions.ObjectStoreFullError: Failed to put object in object store because it is full.",
}  # fmt: skip


@pytest.mark.parametrize("kind", SHARED_MEMORY)
def test_shared_memory_means_many_things(kind: str) -> None:
    assert kinds(diagnose_lines([SHARED_MEMORY[kind]])) == [kind]


def test_two_out_of_memory_errors_of_ray() -> None:
    gpu = "ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.actor_rollout_update_actor()"
    host = "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."
    assert kinds(diagnose_lines([gpu])) == ["cuda-oom"]
    assert kinds(diagnose_lines([host])) == ["ray-host-oom"]


@pytest.mark.parametrize(
    "line",
    [
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        "RuntimeError: Engine core initialization failed. See root cause above.",
        "Worker exit type: SYSTEM_ERROR Worker exit detail: There are some potential root causes. "
        "(1) The process is killed by SIGKILL by OOM killer due to high memory usage.",
        "Error executing job with overrides: []",
        "[rank1]: NCCL watchdog thread terminated with exception",
    ],
)
def test_a_symptom_is_never_a_cause(line: str) -> None:
    diagnosis = diagnose_lines([line])
    assert kinds(diagnosis) == []
    assert diagnosis.symptoms
    assert diagnosis.result == "nothing-known"


def test_an_unknown_log_is_nothing_known_with_its_suspicious_lines() -> None:
    log = ["starting", "ERROR: the flux capacitor is out of plutonium", "FluxError: 1.21 GW", "bye"]
    diagnosis = diagnose_lines(log)
    assert diagnosis.result == "nothing-known"
    assert [line.number for line in diagnosis.suspicious] == [2, 3]


def test_a_clean_log_has_no_cause() -> None:
    diagnosis = diagnose_lines([STEP.format(n) for n in range(1, 200)])
    assert diagnosis.result == "nothing-known"
    assert diagnosis.causes == diagnosis.symptoms == ()
    assert diagnosis.progress == 199


def test_gzip_is_not_text_to_the_engine() -> None:
    """Only inputs.py unpacks; bytes that are no text give no cause."""
    assert kinds(diagnose_chunks([gzip.compress(OOM.encode())])) == []
