"""Every settings rule: a command that it speaks of, and one that it leaves alone."""

from __future__ import annotations

import pytest

from verl_p40.audit.settings import check_command, check_environment, engine
from verl_p40.audit.settings import model as settings_model
from verl_p40.audit.settings.model import SettingFinding, rule_book

GOOD = (
    "python3 -m verl.trainer.main_ppo data.train_files=a.parquet data.train_batch_size=32 "
    "data.max_prompt_length=256 data.max_response_length=256 "
    "actor_rollout_ref.model.path=m actor_rollout_ref.actor.ppo_mini_batch_size=32 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 critic.ppo_micro_batch_size_per_gpu=4 "
    "actor_rollout_ref.actor.optim.lr=1e-6 critic.optim.lr=1e-5 critic.model.path=m "
    "actor_rollout_ref.actor.use_torch_compile=false actor_rollout_ref.rollout.dtype=float32 "
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true "
    "critic.model.fsdp_config.param_offload=true critic.model.fsdp_config.optimizer_offload=true "
    "+actor_rollout_ref.model.override_config.attn_implementation=eager "
    "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.001 trainer.save_freq=10 trainer.test_freq=10 "
    "trainer.total_epochs=2 trainer.val_before_train=False trainer.logger=['console'] "
    "trainer.n_gpus_per_node=1 trainer.nnodes=1 "
)
HF = GOOD + "actor_rollout_ref.rollout.name=hf "
VLLM = GOOD + (
    "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.enable_chunked_prefill=false "
    "actor_rollout_ref.rollout.max_num_batched_tokens=512 "
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.3 "
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1 "
)
A, R, C = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "critic"

CASES: list[tuple[str, str, str]] = [
    # rule, a command that breaks it, the nearest one that does not
    ("vllm-dtype", "export VLLM_DTYPE=float32", "export VLLM_LOGGING_PREFIX=x"),
    ("triton-shared-memory", "TRITON_MAX_SHARED_MEMORY=49152 " + HF, "TRITON_CACHE_DIR=/x " + HF),
    ("attention-env", "export ATTN_IMPLEMENTATION=eager", "export FLASH_ATTENTION_DETERMINISTIC=1"),
    ("dtype-env", "export VERL_DTYPE=float32", "export VERL_LOGGING_LEVEL=INFO"),
    ("accelerate-mixed-precision", "export ACCELERATE_MIXED_PRECISION=no", "export ACCELERATE_X=no"),
    ("tf32", "export NVIDIA_TF32_OVERRIDE=0", "export NVIDIA_VISIBLE_DEVICES=all"),
    ("overwritten-by-main-ppo", "export NCCL_DEBUG=INFO", "export NCCL_P2P_DISABLE=1"),
    ("rocm-flash", "export VLLM_USE_TRITON_FLASH_ATTN=0", "export VLLM_USE_TRITON_AWQ=0"),
    ("flash-version", "export VLLM_FLASH_ATTN_VERSION=2", "export VLLM_CACHE_ROOT=/x"),
    ("vllm-v1", "export VLLM_USE_V1=1", "export VLLM_USE_V1=0"),
    ("attention-backend-raises", "export VLLM_ATTENTION_BACKEND=TORCH_SDPA", "export VLLM_ATTENTION_BACKEND=XFORMERS"),
    ("attention-backend-flash", "export VLLM_ATTENTION_BACKEND=FLASH_ATTN", "export VLLM_ATTENTION_BACKEND=XFORMERS"),
    ("attention-backend-unknown", "export VLLM_ATTENTION_BACKEND=EAGER", "export VLLM_ATTENTION_BACKEND=XFORMERS"),
    ("expandable-segments", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True " + VLLM, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True " + HF),
    ("alloc-conf-unknown", "export PYTORCH_CUDA_ALLOC_CONF=max_split_size:128", "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128,garbage_collection_threshold:0.8"),
    ("alloc-conf-name", "export PYTORCH_ALLOC_CONF=max_split_size_mb:128", "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128"),
    ("arch-list", "export TORCH_CUDA_ARCH_LIST='7.0;8.0'", "export TORCH_CUDA_ARCH_LIST=6.1"),
    ("launch-blocking", "export CUDA_LAUNCH_BLOCKING=1", "export CUDA_LAUNCH_BLOCKING=0"),
    ("ppo-fsdp-config", HF + "++actor_rollout_ref.fsdp_config.cpu_offload=true", HF + f"{A}.fsdp_config.optimizer_offload=true"),
    ("ppo-offload-names", HF + f"++{A}.fsdp_config.cpu_offload=true", HF + f"{A}.fsdp_config.optimizer_offload=true"),
    ("pf-ppo-names", HF + "algorithm.pf_ppo.weight_pow=3", HF + "+algorithm.pf_ppo_weight_pow=3"),
    ("kl-in-reward-off", HF + "algorithm.use_kl_in_reward=false", HF),
    ("kl-loss-off", HF + f"{A}.kl_loss_coef=0.001", HF + f"{A}.use_kl_loss=true {A}.kl_loss_coef=0.001"),
    ("listed-but-unread", HF + "critic.optim.min_lr_ratio=0.1", HF + f"{A}.optim.min_lr_ratio=0.1"),
    ("ref-strategy", HF + "actor_rollout_ref.ref.strategy=fsdp", HF + f"{A}.strategy=fsdp"),
    ("ref-forward-prefetch", HF + "actor_rollout_ref.ref.fsdp_config.forward_prefetch=true", HF + f"{A}.fsdp_config.forward_prefetch=true"),
    ("fire-sampling", VLLM + f"{R}.use_fire_sampling=true", VLLM + f"{R}.do_sample=true"),
    ("free-cache-engine", VLLM + f"{R}.free_cache_engine=true", VLLM + f"{R}.free_cache_engine=false {R}.enforce_eager=false"),
    ("eager-and-free-cache", VLLM + f"{R}.enforce_eager=false", VLLM + f"{R}.enforce_eager=true"),
    ("fsdp2-only", HF + f"{A}.fsdp_config.offload_policy=true", HF + f"{A}.strategy=fsdp2 {C}.strategy=fsdp2 {A}.fsdp_config.offload_policy=true"),
    ("override-torch-dtype", HF + "+actor_rollout_ref.model.override_config.torch_dtype=float32", HF + f"+{A}.fsdp_config.model_dtype=fp32"),
    ("rollout-bf16", VLLM + f"{R}.dtype=bfloat16", VLLM),
    ("rollout-fp16", VLLM + f"{R}.dtype=half", VLLM),
    ("rollout-auto", VLLM + f"{R}.dtype=auto", VLLM),
    ("fsdp-half", HF + f"+{A}.fsdp_config.mixed_precision.param_dtype=bf16", HF + f"+{A}.fsdp_config.mixed_precision.param_dtype=fp32"),
    ("flash-attention", HF + "+critic.model.override_config.attn_implementation=flash_attention_2", HF + "+critic.model.override_config.attn_implementation=sdpa"),
    ("remove-padding", HF + "critic.model.use_remove_padding=True", HF + "critic.model.use_remove_padding=False"),
    ("torch-compile", HF + f"{A}.use_torch_compile=true", HF),
    ("triton-kernels", HF + "actor_rollout_ref.model.use_fused_kernels=true actor_rollout_ref.model.fused_kernel_options.impl_backend=triton", HF + "actor_rollout_ref.model.fused_kernel_options.impl_backend=torch"),
    ("liger", HF + "actor_rollout_ref.model.use_liger=true", HF + "actor_rollout_ref.model.use_liger=false"),
    ("prefix-caching", VLLM + f"{R}.enable_prefix_caching=true", VLLM + f"{R}.enable_prefix_caching=false"),
    ("chunked-prefill", VLLM + f"{R}.enable_chunked_prefill=true", VLLM),
    ("batched-tokens", VLLM + f"{R}.max_num_batched_tokens=511", VLLM),
    ("rollout-engine", GOOD + f"{R}.name=sglang", HF),
    ("rollout-async", VLLM + f"{R}.mode=async", VLLM + f"{R}.mode=sync"),
    ("hf-param-offload", HF + f"{A}.fsdp_config.param_offload=true", VLLM + f"{A}.fsdp_config.param_offload=true"),
    ("max-num-seqs", VLLM + f"{R}.max_num_seqs=1", VLLM + f"+{R}.engine_kwargs.vllm.max_num_seqs=8"),
    ("engine-kwargs-twice", VLLM + f"+{R}.engine_kwargs.vllm.dtype=float32", VLLM + f"+{R}.engine_kwargs.vllm.max_num_seqs=8"),
    ("hf-rollout-ignores", HF + f"{R}.gpu_memory_utilization=0.3", HF + f"{R}.temperature=1.0"),
    ("batch-of-one", HF + f"data.train_batch_size=1 {A}.ppo_mini_batch_size=1 {A}.ppo_micro_batch_size_per_gpu=1", HF),
    ("mini-above-train", HF + f"{A}.ppo_mini_batch_size=64", HF),
    ("critic-mini-above-train", HF + f"{C}.ppo_mini_batch_size=64", HF + f"{C}.ppo_mini_batch_size=64 algorithm.adv_estimator=rloo"),
    ("micro-divides-mini", HF + f"{A}.ppo_micro_batch_size_per_gpu=5", HF + f"{A}.ppo_micro_batch_size_per_gpu=8"),
    ("micro-deprecated", HF + f"{C}.forward_micro_batch_size=1", HF + f"{C}.forward_micro_batch_size_per_gpu=1"),
    ("micro-both-actor", HF + f"{A}.ppo_micro_batch_size=4", HF + f"{A}.ppo_micro_batch_size=null"),
    ("micro-both-critic", HF + f"{C}.ppo_micro_batch_size=4", HF + f"{C}.ppo_micro_batch_size=null"),
    ("grpo-group-of-one", HF + "algorithm.adv_estimator=grpo", HF + f"algorithm.adv_estimator=grpo {R}.n=8"),
    ("strategy", HF + f"{A}.strategy=megatron", HF + f"{A}.strategy=fsdp"),
    ("eight-gpus", HF.replace("trainer.n_gpus_per_node=1", ""), HF),
    ("sed-bfloat16", "sed -i 's/\"bfloat16\"/\"float32\"/g' verl/utils/torch_dtypes.py", "sed -i 's/a/b/' notes.txt"),
    ("sed-flash-attention", "find . -name '*.py' | xargs sed -i 's/flash_attention_2/eager/'", "grep -rn flash_attention_2 ."),
    ("pip-flash-attn", "pip install flash-attn --no-build-isolation", "pip install flask"),
    ("pip-kernels", "uv pip install liger-kernel", "uv pip install tiger"),
    ("pip-torch", "python -m pip install torch==2.8.0", "python -m pip install torch==2.6.0+cu118"),
    ("pip-cuda-index", "pip install torch==2.6.0 --index-url https://example.org/whl/cu128", "pip install torch==2.6.0 --index-url https://example.org/whl/cu118"),
    ("pip-vllm", "pip3 install vllm==0.8.5.post1", "pip3 install ./vllm-0.8.5.post1+p40.whl"),
    ("pip-verl", "pip install 'verl>=0.5'", "pip install verl==0.4.1"),
    ("pip-xformers", "pip install xformers", "pip install xformers==0.0.29.post2"),
    ("pip-triton", "pip install triton==2.3.1", "pip install triton==3.2.0"),
    ("pip-transformers", "pip install -U transformers", "pip install transformers==4.51.3"),
]  # fmt: skip


def _rules(text: str) -> set[str]:
    return {finding.rule for finding in check_command(text)}


@pytest.mark.parametrize("command", [HF, VLLM], ids=["hf", "vllm"])
def test_a_good_command_yields_nothing(command: str) -> None:
    assert check_command(command) == []


@pytest.mark.parametrize(("rule", "bad", "good"), CASES, ids=[case[0] for case in CASES])
def test_rule(rule: str, bad: str, good: str) -> None:
    assert rule in _rules(bad)
    assert rule not in _rules(good)


def test_every_rule_has_a_case() -> None:
    assert {case[0] for case in CASES} == {rule.id for rule in rule_book().rules}


@pytest.mark.parametrize(
    ("text", "rule", "replacement"),
    [
        (HF + "++trainer.foo=1", "key-unread", ""),
        (HF + "+trainer.n_gpu_per_node=1", "key-unread", "trainer.n_gpus_per_node=1"),
        (HF + "trainer.n_gpu_per_node=1", "key-unknown", "trainer.n_gpus_per_node=1"),
        (HF + "++actor_rollout_ref.optim.lr=1", "key-unread", "actor_rollout_ref.actor.optim.lr=1"),
        (HF + "data.seed=1", "key-needs-plus", "+data.seed=1"),
        (HF + "+data.shuffle=true", "key-exists", "data.shuffle=true"),
        ("export VLLM_ATTENTION_BACKENDS=XFORMERS", "env-unread", "VLLM_ATTENTION_BACKEND"),
        ("sed -i s/a/b/ /opt/verl/verl/critic/modeling/llm.py", "path-missing", ""),
        ("sed -i s/a/b/ site-packages/verl/workers/dp_actor.py", "path-missing", "verl/workers/actor/dp_actor.py"),
        ("python -m verl.trainer.main_ppoo", "module-missing", "python -m verl.trainer.main_ppo"),
        ("python -m verl.trainer.main_ppo --config-name ppo_megatron_trainer", "megatron-config", "--config-name ppo_trainer"),
    ],
)  # fmt: skip
def test_unknown_names(text: str, rule: str, replacement: str) -> None:
    found = [finding for finding in check_command(text) if finding.rule == rule]
    assert len(found) == 1
    assert replacement in found[0].replacement


@pytest.mark.parametrize(
    "text",
    [
        HF + "+data.seed=1",
        HF + "++data.shuffle=true",
        HF + f"+{A}.fsdp_config.mixed_precision.reduce_dtype=fp32",
        HF + "+actor_rollout_ref.model.override_config.attention_dropout=0.0",
        HF + "+custom_reward_function.reward_kwargs.x=1 custom_reward_function.path=r.py",
        HF + f"+{R}.repetition_penalty=1.1",
        HF + "~trainer.default_hdfs_dir hydra.run.dir=out",
        HF + "data.train_files=$FILES data.val_files=$(ls *.parquet)",
        "VERL_P40_HOME=/x verl-p40 train p40-ppo data.train_batch_size=8",
        "python verl/examples/data_preprocess/gsm8k.py --local_dir x",
        "python3 -m verl.trainer.main_eval data.path=x",
        "export VLLM_API_KEY=$KEY VLLM_ATTENTION_BACKEND=$BACKEND",
        "# export VLLM_DTYPE=float32\necho 'VLLM_DTYPE=float32'",
        "cat <<EOF > notes.txt\nexport VLLM_DTYPE=float32\nEOF",
        "ray start --head && ray status",
    ],
)
def test_near_misses(text: str) -> None:
    assert check_command(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "bash -c 'export VLLM_DTYPE=float32'",
        "bash <<EOF\nexport VLLM_DTYPE=float32\nEOF",
        "cat > start.sh <<'EOF'\nexport VLLM_DTYPE=float32\nEOF",
        "docker run -e VLLM_DTYPE=float32 image",
        "env VLLM_DTYPE=float32 python x.py",
        "VLLM_DTYPE=float32 nohup python x.py &",
        "if true; then export VLLM_DTYPE=float32; fi",
    ],
)
def test_variables_are_found_wherever_they_are_set(text: str) -> None:
    assert _rules(text) == {"vllm-dtype"}


def test_values_follow_variables_arrays_and_references() -> None:
    text = (
        "N=64\nARGS=(data.train_batch_size=32)\n"
        + HF
        + f'{A}.ppo_mini_batch_size=$N "${{ARGS[@]}}"'
    )
    found = {finding.rule: finding for finding in check_command(text)}
    assert set(found) == {"mini-above-train", "critic-mini-above-train"}
    assert "ppo_mini_batch_size=64" in found["critic-mini-above-train"].message


def test_line_numbers_and_order() -> None:
    text = (
        "#!/bin/bash\nexport VLLM_DTYPE=float32\n"
        + HF.replace(" data.", " \\\n data.")
        + " \\\n ++trainer.foo=1\n"
    )
    found = check_command(text)
    lines = text.splitlines()
    assert [f.line for f in found] == [2, 1 + next(i for i, x in enumerate(lines) if "foo" in x)]


def test_presets_keep_their_own_defaults() -> None:
    """What a preset sets is not known here, so verl's defaults must not be held against it."""
    assert check_command("verl-p40 train p40-ppo actor_rollout_ref.rollout.name=vllm") == []
    assert _rules("verl-p40 train p40-ppo +foo.bar=1") == {"key-unread"}


def test_environment() -> None:
    found = check_environment({"VLLM_DTYPE": "float32", "PATH": "/bin", "VLLM_USE_V1": "1"})
    assert [(f.rule, f.kind, f.line) for f in found] == [
        ("vllm-v1", "wrong", 0),
        ("vllm-dtype", "no-op", 0),
    ]
    assert check_environment({}) == []


def test_the_recipe() -> None:
    """The start script that people copy: each of its no-ops by name, and what really works."""
    text = """
    export HYDRA_FULL_ERROR=1 PYTHONUNBUFFERED=1 PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128
    export VLLM_DTYPE=float32 TRITON_MAX_SHARED_MEMORY=49152
    python3 -m verl.trainer.main_ppo data.train_batch_size=1 \\
      data.max_prompt_length=256 data.max_response_length=256 \\
      actor_rollout_ref.actor.ppo_mini_batch_size=1 algorithm.kl_ctrl.kl_coef=0.001 \\
      actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \\
      actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.max_num_seqs=1 \\
      actor_rollout_ref.rollout.gpu_memory_utilization=0.3 \\
      actor_rollout_ref.rollout.max_num_batched_tokens=512 \\
      actor_rollout_ref.rollout.enable_chunked_prefill=false \\
      ++actor_rollout_ref.fsdp_config.cpu_offload=true \\
      ++actor_rollout_ref.fsdp_config.offload_params=true \\
      trainer.n_gpus_per_node=1 2>&1 | tee train.log
    """
    assert [(f.rule, f.kind) for f in check_command(text)] == [
        ("triton-shared-memory", "no-op"),
        ("vllm-dtype", "no-op"),
        ("batch-of-one", "ok-note"),
        ("kl-in-reward-off", "no-op"),
        ("max-num-seqs", "no-op"),
        ("ppo-fsdp-config", "no-op"),
        ("ppo-fsdp-config", "no-op"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules: [{id: a}]\nenvironments: []", "kind"),
        ("rules: [{id: a, kind: odd, env: X, message: long enough text, source: there}]", "kind"),
        ("rules: [{id: a, kind: wrong, message: long enough text, source: there}]", "exactly one"),
        ("rules: [{id: a, kind: wrong, env: X, value: '(', message: long enough text, source: there}]", "value"),
        ("rules: [{id: a, kind: wrong, pip: [x], supported: '=2', message: long enough text, source: there}]", "supported"),
        ("rules: [", "not YAML"),
    ],
)  # fmt: skip
def test_bad_rule_file_is_one_clear_line(text: str, message: str) -> None:
    from verl_p40.errors import UsageError

    with pytest.raises(UsageError) as error:
        settings_model.parse(text, "rules.yaml")
    assert message in error.value.message
    assert "\n" not in error.value.message


def test_a_finding_is_plain_data() -> None:
    finding = check_command("export VLLM_DTYPE=float32")[0]
    assert isinstance(finding, SettingFinding)
    assert set(finding.to_json()) == {
        "kind", "rule", "setting", "line", "message", "replacement", "source",
    }  # fmt: skip
    assert engine.problems("echo 'x") != []
