from __future__ import annotations

from pathlib import Path

import pytest

from verl_p40.errors import UsageError
from verl_p40.train import catalog


def test_the_presets_describe_themselves() -> None:
    found = {preset.name: preset.about for preset in catalog.all_presets()}
    assert set(found) == {
        "cpu-demo",
        "p40-grpo",
        "p40-grpo-1.5b",
        "p40-lora",
        "p40-ppo",
        "p40-ppo-vllm",
        "p40-recipe",
        "p40x2",
        "p40x4",
    }
    assert found["cpu-demo"].shown is catalog.Shown.CPU
    assert found["cpu-demo"].data == "demo"
    assert found["p40-ppo"].data == "gsm8k"


def test_only_the_recipe_exports_no_ops_and_names_them() -> None:
    noops = {
        (preset.name, name)
        for preset in catalog.all_presets()
        for name, variable in preset.about.env.items()
        if variable.noop
    }
    assert noops == {("p40-recipe", "VLLM_DTYPE"), ("p40-recipe", "TRITON_MAX_SHARED_MEMORY")}
    about = catalog.load("p40-recipe").about
    assert all("NO-OP" in v.why for v in about.env.values() if v.noop)


def test_an_unknown_preset_gets_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="unknown preset 'cpu-dmo'; nearest: cpu-demo"):
        catalog.load("cpu-dmo")


def test_shared_parts_are_not_presets() -> None:
    with pytest.raises(UsageError, match="unknown preset '_fp32'"):
        catalog.load("_fp32")


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "defaults: [cpu-demo, _self_]\n"
        "verl_p40: {description: my very own, shown: planned only, data: none, model: m}\n"
    )
    assert catalog.load(str(mine)).name == "mine"
    with pytest.raises(UsageError, match=r"absent\.yaml does not exist"):
        catalog.load(str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("", "has no verl_p40 section"),
        ("verl_p40: {description: my very own, data: none, model: m}", "verl_p40.shown"),
        (
            "verl_p40: {description: my very own, shown: works on my P40, data: none, model: m}",
            "verl_p40.shown",
        ),
        (
            "verl_p40: {description: my very own, shown: CPU run, data: none, model: m, gpu: 1}",
            "verl_p40.gpu",
        ),
    ],
)
def test_a_bad_description_names_the_key(tmp_path: Path, section: str, said: str) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"defaults: [cpu-demo]\n{section}\n")
    with pytest.raises(UsageError, match=said):
        catalog.load(str(mine))
