"""Examples for a node and for a Slurm cluster: sound scripts, which train as one device does."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import autopar
from autopar.runtime.comm import Communicator
from autopar.runtime.launch import LocalRanks
from autopar.runtime.tiny_gpt import text_batches

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "train_plan.py"
STEPS = 3

# Stands for Slurm's: two tasks on this machine, with the variables that srun sets.
SRUN = """
while [ "${1#--}" != "$1" ]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" &
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" && wait $!
"""

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def train(comm: Communicator, plan: str, weights: str) -> None:
    """The example's `main` on a rank of a pool, which torchrun did not start."""
    words = [str(SCRIPT), "--plan", plan, "--model", "small", "--steps", str(STEPS)]
    with (
        patch.object(sys, "argv", [*words, "--save", weights]),
        patch.dict(os.environ, RANK=str(comm.rank)),
    ):
        runpy.run_path(str(SCRIPT), run_name="__main__")


def trained_on_one_device(steps: int) -> dict[str, torch.Tensor]:
    """Weights of the example's model after the same steps in plain PyTorch."""
    model, (tokens, _), _ = runpy.run_path(str(SCRIPT))["small"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for batch in islice(text_batches(*tokens.shape), steps):
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
    return model.state_dict()


def check_weights(file: Path, steps: int) -> None:
    expected, found = trained_on_one_device(steps), torch.load(file)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=2e-5, msg=name)


def test_a_plan_file_trains_as_one_device_and_its_weights_load(ranks2: LocalRanks, tmp_path: Path):
    model, args, _ = runpy.run_path(str(SCRIPT))["small"]()
    plan, weights = tmp_path / "plan.json", tmp_path / "weights.pt"
    autopar.plan(model, "2xcpu", args, mesh="dp=2", constraints="ddp,zero=2").save(plan)
    ranks2.run(train, str(plan), str(weights))
    check_weights(weights, STEPS)


@pytest.mark.parametrize("name", ["node.sh", "slurm.sbatch"])
def test_the_scripts_are_bash(name: str):
    done = subprocess.run(["bash", "-n", EXAMPLES / name], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_job_has_a_task_for_each_device_of_its_cluster():
    text = (EXAMPLES / "slurm.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\d+)$", text, re.MULTILINE))
    cluster = autopar.ClusterSpec.parse(re.findall(r"CLUSTER:-([^}]+)}", text)[0])
    (group,) = cluster.groups
    assert (int(asked["nodes"]), int(asked["ntasks-per-node"])) == (
        group.nodes,
        group.devices_per_node,
    )
    assert asked["gpus-per-node"] == asked["ntasks-per-node"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["node.sh", "slurm.sbatch"])
def test_the_scripts_train_on_two_cpu_ranks(name: str, tmp_path: Path):
    commands = {
        "autopar": f'exec "{sys.executable}" -m autopar "$@"',
        "torchrun": f'exec "{sys.executable}" -m torch.distributed.run "$@"',
        "python": f'exec "{sys.executable}" "$@"',
        "srun": SRUN,
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    for command, text in commands.items():
        (folder / command).write_text(text)  # bash takes a file without a first line for its own
        (folder / command).chmod(0o755)
    job = {"SLURM_JOB_ID": str(os.getpid()), "EXAMPLES": str(EXAMPLES)} if "slurm" in name else {}
    sizes = {"GPUS": "2", "CLUSTER": "2xcpu", "MODEL": "small", "STEPS": str(STEPS)}
    done = subprocess.run(
        ["bash", EXAMPLES / name],
        env={**os.environ, **job, **sizes, "PATH": f"{folder}:{os.environ['PATH']}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(rf"step +{STEPS}  loss 5\.\d+", done.stdout)
    check_weights(tmp_path / "weights.pt", STEPS)
