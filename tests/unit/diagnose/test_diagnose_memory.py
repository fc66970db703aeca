"""The numbers of a CUDA out of memory error, from messages that torch really printed."""

from __future__ import annotations

from verl_p40.diagnose import diagnose_lines
from verl_p40.diagnose.memory import CudaOom, advise, read

GIB, MIB = 1 << 30, 1 << 20
NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 13.91 GiB. GPU 0 has a total "
    "capacity of 79.11 GiB of which 8.85 GiB is free. Process 23444 has 70.25 GiB memory in use. Of "
    "the allocated memory 60.49 GiB is allocated by PyTorch, and 16.77 GiB is reserved by PyTorch "
    "but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
OLD = [
    "RuntimeError: CUDA out of memory. Tried to allocate 1024.00 MiB (GPU 0;",
    "14.76 GiB total capacity; 12.29 GiB already allocated; 945.75 MiB free;",
    "12.57 GiB reserved in total by PyTorch) If reserved memory is >> allocated",
]
CROWDED = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 22.38 GiB of "
    "which 10.00 MiB is free. Process 1 has 12.00 GiB memory in use. Including non-PyTorch memory, "
    "this process has 10.36 GiB memory in use. Of the allocated memory 9.00 GiB is allocated by "
    "PyTorch, and 5.00 MiB is reserved by PyTorch but unallocated."
)


def test_todays_message() -> None:
    oom = read([NEW], phase="cuda-oom")
    assert oom is not None
    assert oom.tried == int(13.91 * GIB)
    assert oom.total == int(79.11 * GIB)
    assert oom.free == int(8.85 * GIB)
    assert oom.allocated == int(60.49 * GIB)
    assert oom.unused == int(16.77 * GIB)
    assert oom.others is None, "in a container the process's own memory is 'Process N'"
    assert oom.fragmented
    assert any("expandable_segments" in fix for fix in advise(oom))


def test_the_message_before_torch_2_1_wrapped_by_a_terminal() -> None:
    oom = read(OLD, phase="cuda-oom")
    assert oom is not None
    assert (oom.tried, oom.total) == (GIB, int(14.76 * GIB))
    assert oom.free == int(945.75 * MIB)
    assert oom.unused == int(12.57 * GIB) - int(12.29 * GIB)
    assert not oom.fragmented


def test_other_processes_on_the_card() -> None:
    oom = read([CROWDED], phase="cuda-oom")
    assert oom is not None
    assert oom.others == 12 * GIB
    assert oom.crowded
    assert "nvidia-smi" in advise(oom)[0]


def test_a_message_cut_off() -> None:
    assert read(["CUDA out of memory. Tried to all"], phase="p") == CudaOom(phase="p")
    assert read(["something else"], phase="p") is None
    assert CudaOom(phase="p").sentence() == ""


def test_phase_model_and_numbers_are_in_the_diagnosis() -> None:
    log = [
        "Traceback (most recent call last):",
        '  File "/env/verl/workers/critic/dp_critic.py", line 160, in update_critic',
        "    self.critic_optimizer.step()",
        '  File "/env/torch/optim/adamw.py", line 608, in _multi_tensor_adamw',
        "    exp_avg_sq_sqrt = torch._foreach_sqrt(device_exp_avg_sqs)",
        NEW,
    ]
    (cause,) = diagnose_lines(log).causes
    assert cause.kind == "cuda-oom-optimizer"
    assert cause.details["model"] == "critic"
    assert cause.details["tried_bytes"] == str(int(13.91 * GIB))
    assert "13.91 GiB" in cause.text
    assert any("critic.model.fsdp_config.optimizer_offload=True" in fix for fix in cause.fix)


def test_what_neither_torch_has_nor_is_free_is_somebody_else_s() -> None:
    """The older message names no processes."""
    line = (
        "CUDA out of memory. Tried to allocate 800.00 MiB (GPU 0; 23.70 GiB total capacity; "
        "16.55 GiB already allocated; 407.56 MiB free; 17.43 GiB reserved in total by PyTorch)"
    )
    oom = read([line], phase="cuda-oom")
    assert oom is not None and oom.others is not None
    assert 4.8 < oom.others / 2**30 < 4.9
    assert any("nvidia-smi" in fix for fix in advise(oom))
    alone = line.replace("17.43 GiB reserved", "22.90 GiB reserved")
    oom = read([alone], phase="cuda-oom")
    assert oom is not None and oom.others is None
