"""Logs as Ray 2.47 and verl 0.4.1 really wrote them, shortened."""

from __future__ import annotations

import signal

from verl_p40.train.failures import clean, describe_exit, explain
from verl_p40.train.phases import Phases

WORKER_ERROR = """\
(TaskRunner pid=20514) Total training steps: 6
(WorkerDict pid=20938) Actor use_remove_padding=False
Error executing job with overrides: []
Traceback (most recent call last):
  File "/env/verl/trainer/main_ppo.py", line 64, in run_ppo
    ray.get(runner.run.remote(config))
ray.exceptions.RayTaskError(AssertionError): \x1b[36mray::TaskRunner.run()\x1b[39m (pid=20514, ip=192.0.2.2)
  File "/env/verl/trainer/main_ppo.py", line 198, in run
    trainer.init_workers()
ray.exceptions.RayTaskError(AssertionError): \x1b[36mray::WorkerDict.actor_rollout_init_model()\x1b[39m (pid=20938)
  File "/env/verl/workers/fsdp_workers.py", line 410, in _build_rollout
    assert self.world_size % infer_tp == 0
AssertionError: rollout world_size: 1 is not divisible by infer_tp: 2
(WorkerDict pid=20938) Qwen2ForCausalLM contains 23.97K parameters
"""

DIED = """\
(TaskRunner pid=1) ok
Traceback (most recent call last):
  File "/env/ray/worker.py", line 2, in get
    raise value
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
\tclass_name: create_colocated_worker_cls.<locals>.WorkerDict
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR
"""


def test_the_worker_s_own_error_is_the_headline() -> None:
    found = explain(WORKER_ERROR)
    assert found.headline == "AssertionError: rollout world_size: 1 is not divisible by infer_tp: 2"
    error, known, remedy = found.lines[-3:]
    assert error == found.headline
    assert known.startswith("cause (high confidence): The tensor-parallel size does not divide")
    assert remedy.startswith("try: actor_rollout_ref.rollout.tensor_model_parallel_size=1")
    assert not any("WorkerDict pid" in line or "\x1b" in line for line in found.lines)


def test_the_first_cause_before_a_dead_actor() -> None:
    cause = (
        "(WorkerDict pid=7) Traceback (most recent call last):\n"
        '(WorkerDict pid=7)   File "x.py", line 1, in f\n'
        "(WorkerDict pid=7) MemoryError: no room for logits\n"
    )
    assert explain(cause + DIED).headline == "MemoryError: no room for logits"


def test_a_sign_of_a_killed_process_before_a_dead_actor() -> None:
    killed = "(raylet) 1 Workers (tasks / actors) killed due to memory pressure (OOM)\n"
    sign = "(WorkerDict pid=7) *** SIGSEGV received at time=1 on cpu 0 ***\n"
    assert explain(sign + DIED).headline == "*** SIGSEGV received at time=1 on cpu 0 ***"
    assert explain(killed + sign + DIED).headline == killed.rstrip()


def test_a_dead_actor_when_there_is_nothing_better() -> None:
    assert explain(DIED).headline.startswith("ray.exceptions.ActorDiedError: The actor died")


def test_without_an_error_the_last_lines_speak() -> None:
    found = explain("one\n\n(TaskRunner pid=4) step:5 - actor/entropy:4.575\ntwo" + "o" * 999)
    assert found.headline == "the log names no error"
    assert found.lines[0] == "one"
    assert len(found.lines) == 2
    assert len(found.lines[1]) == 400
    assert explain("").lines == ()


def test_chained_errors_give_the_first() -> None:
    log = (
        "Traceback (most recent call last):\n"
        '  File "a.py", line 1, in f\n'
        "KeyError: 'bf16'\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n"
        '  File "b.py", line 1, in g\n'
        "hydra.errors.InstantiationException: could not\n"
    )
    assert explain(log).headline == "KeyError: 'bf16'"


def test_cleaning_a_line() -> None:
    assert clean("\x1b[36m(WorkerDict pid=3, ip=10.0.0.1)\x1b[0m x") == "x"
    assert clean("(raylet) kept") == "(raylet) kept"
    assert clean("Training:  0%|   \rTraining: 10%|#  ") == "Training: 10%|#"
    assert clean("(main_task pid=3) x [repeated 2x across cluster] (Ray ...)") == "x"


def test_exit_codes_and_signals() -> None:
    assert describe_exit(1) == "exit code 1"
    assert describe_exit(-signal.SIGKILL) == "killed by SIGKILL (out of memory?)"
    assert describe_exit(-signal.SIGSEGV) == "killed by SIGSEGV"


def test_phases_follow_the_log() -> None:
    phases = Phases()
    assert phases.current == "starting Ray"
    seen = []
    for line in (
        b"2026-11-30 INFO worker.py:1888 -- Started a local Ray instance.",
        b"(TaskRunner pid=1) Using dataset class: RLHFDataset",
        b"(TaskRunner pid=1) Total training steps: 60",
        b"(WorkerDict pid=2) Model config after override: Qwen2Config {",
        b"(TaskRunner pid=1) test_gen_batch meta info: {}",
        b"(TaskRunner pid=1) Initial validation metrics: {}",
        b"nothing of note \xff",
        b"(TaskRunner pid=1) local_global_step_folder: x",
    ):
        phases.feed(line)
        seen.append(phases.current)
    assert phases.total == 60
    assert seen == [
        "loading verl", "reading the data", "starting the workers", "loading the models",
        "validating", "training", "training", "saving a checkpoint",
    ]  # fmt: skip
    phases.step_done()
    assert phases.current == "training"


def test_a_log_that_ends_where_the_disk_was_full() -> None:
    """The trainer's own words are missing then: its log is on that disk."""
    log = "step:3 - actor/entropy:4.5\nError executing job with overrides: []\n"
    found = explain(log, full=True)
    assert found.kind == "disk-full"
    assert "no room left" in found.headline
    assert any("the disk is full" in line for line in found.known)
    assert explain(log).kind == ""
    known = "OSError: [Errno 28] No space left on device: '/runs/a/checkpoints/x.pt'\n"
    assert explain(log + known, full=True).headline == known.rstrip()
    other = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    assert explain(log + other, full=True).kind.startswith("cuda-oom")
