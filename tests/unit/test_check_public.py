"""Every public configuration is answered; those known to have run are said to fit.

Sources of configurations and runs: tests/data/configs/SOURCES.md. Measured seconds are those of the
published rows (`cost_models/published/rows.jsonl`) or of the source named beside them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.cli.main import main

CONFIGS = Path(__file__).parents[1] / "data" / "configs"

# Configuration, cluster, further words, whether it is known to have run, measured step in seconds.
PUBLIC = (
    ("torchtitan_debug.toml", "2xA10G", (), False, None),
    ("torchtitan_llama3_8b.toml", "8x8xA100-80-SXM", (), True, 2.82),
    ("torchtitan_llama3_70b.toml", "32x8xH100-SXM-96", (), True, None),
    ("torchtitan_llama3_405b.toml", "16x8xH100-SXM-96", (), True, 11.57),
    ("megatron_t5_220m.sh", "1x8xA100-80-SXM", (), False, None),
    ("megatron_llama3_8b_fp8.sh", "1x8xH100-SXM", (), True, 9.49),  # its README: 13812 tokens/s
    ("nemo_gpt3_20b.yaml", "64x8xA100-80-SXM", (), True, None),
    ("bloom_176b.slurm", "48x8xA100-80-SXM", (), True, 104.0),  # 178B, same plan
    ("megatron_gpt3_175b_2021.sh", "128x8xA100-80-SXM", (), True, None),
    ("megatron_gpt3_175b.sh", "16x8xA100-80-SXM", (), False, None),
    ("mt_nlg_530b.txt", "280x8xA100-80-SXM", (), True, 60.1),
    ("deepspeed_zero2_8b.json", "1x8xB200", ("llama3-8b", "--seq-len", "8192"), True, None),
    ("deepspeed_zero3.json", "1x8xA100-40-SXM", ("t5-3b", "--global-batch-size", "64"), False,
     None),
    ("deepspeed_autotp.json", "1x8xA100-80-SXM",
     ("llama2-7b", "--global-batch-size", "8", "--seq-len", "2048"), False, None),
    ("accelerate_tp_hsdp.yaml", "1x8xH100-SXM",
     ("llama3-8b", "--global-batch-size", "8", "--seq-len", "2048"), False, None),
    ("accelerate_context.yaml", "1x8xH100-SXM",
     ("llama3-8b", "--global-batch-size", "8", "--seq-len", "8192"), False, None),
)  # fmt: skip


def test_every_configuration_is_answered_somewhere():
    there = {file.name for file in CONFIGS.iterdir() if file.suffix != ".md"}
    assert {item[0] for item in PUBLIC} == there


@pytest.mark.long
@pytest.mark.parametrize(("name", "cluster", "words", "ran", "measured_s"), PUBLIC)
def test_public_configurations(name, cluster, words, ran, measured_s, capsys, record_property):
    arguments = [str(CONFIGS / name), *words, "--cluster", cluster, "--time-limit", "10", "--json"]
    code = main(["check", *arguments])
    found = json.loads(capsys.readouterr().out)
    predicted, best = found["predicted"], found["best"]
    rank = predicted["fullest_rank"]
    over = predicted["device_bytes"][rank] - predicted["capacity_bytes"][rank]
    record_property(
        "summary",
        f"{name}: fits {found['fits']}, {predicted['device_bytes'][rank] / 1e9:.1f} GB,"
        f" {predicted['step_s']:.3g} s, best {best and best['step_s']}, {found['changes'][:2]}",
    )
    assert code == (0 if found["fits"] else 1) and found["fits"] == (over <= 0)
    assert predicted["step_s"] > 0 and found["searched"]
    if ran:
        assert found["fits"]
    if not found["fits"]:
        assert found["changes"], "what does not fit is told what to change"
    if measured_s is not None:  # a third: kernels that the file does not tell of are not known
        assert predicted["step_s"] == pytest.approx(measured_s, rel=0.33)
