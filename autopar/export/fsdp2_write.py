"""Writes the script of `autopar.export.fsdp2`: constants that say the plan, and the code for it."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.export import fsdp2_text as text
from autopar.export.common import describe
from autopar.export.result import Loss
from autopar.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a script is to do.

    Attributes:
        plan: The plan, for its description.
        losses: What the script does otherwise.
        notes: What else people should know.
        mesh: Expression of the tensor of ranks: pipeline, replicate, shard, tensor.
        degrees: Sizes of these four axes.
        microbatches: Parts of a rank's batch.
        mode: How gradients are made one over data ranks: ``none``, ``ddp``, ``sum`` or ``fsdp``.
        reshard: Whether gathered parameters are freed after use.
        late: Whether gradients are reduced after the last microbatch only.
        layers: Pattern of the repeated layers.
        stages: Modules of every stage; empty without a pipeline.
        schedule: Class of the schedule.
        chunks: Stages per rank.
        fold: Whether stages go down the ranks and up again.
        styles: Module pattern to expression of its style of tensor parallelism.
        vocabulary: Whether the vocabulary is split.
        sums: Modules whose gradients are partial over tensor ranks.
        sequence: First layer, last module, and the modules that gather; empty without.
        full: Layers that are computed again.
        cheap: Layers of which only products are kept.
    """

    plan: Plan
    losses: tuple[Loss, ...]
    notes: tuple[str, ...]
    mesh: str
    degrees: tuple[int, int, int, int]
    microbatches: int
    mode: str
    reshard: bool
    late: bool
    layers: str
    stages: tuple[tuple[str, ...], ...]
    schedule: str
    chunks: int
    fold: bool
    styles: tuple[tuple[str, str], ...]
    vocabulary: bool
    sums: tuple[str, ...]
    sequence: tuple[str, str, tuple[str, ...]] | None
    full: tuple[str, ...]
    cheap: tuple[str, ...]


def write(script: Script) -> str:
    """The Python file."""
    parts = [_head(script), _imports(script), _constants(script), text.LOAD, text.LOSS]
    parts.append(text.STAGE if script.stages else text.WHOLE)
    for wanted, piece in (
        (script.styles, text.TENSOR),
        (script.sequence, text.SEQUENCE),
        (script.full, text.RECOMPUTE),
        (script.cheap, text.SELECTIVE),
        (script.mode == "fsdp", text.SHARD),
        (script.stages, text.SUM_TIED),
    ):
        if wanted:
            parts.append(piece)
    parts += [_trainer(script), text.MAIN]
    return "".join(parts)


def _head(script: Script) -> str:
    ranks = script.degrees[0] * script.degrees[1] * script.degrees[2] * script.degrees[3]
    lines = [
        '"""Trains a model as a plan says, in plain PyTorch (2.11 or later).',
        "",
        f"The plan: {describe(script.plan)}.",
        "",
        f"    torchrun --nproc-per-node {ranks} THIS_FILE file.py:function",
        "",
        "The function returns (model, args, kwargs), or a dict with these and loss_fn. args and",
        "kwargs are the global batch, batch dim first, and the same on every rank.",
    ]
    for title, items in (
        ("Not as in the plan:", script.losses),
        ("To know:", script.notes),
    ):
        if items:
            lines += ["", title, ""]
            lines += [line for item in items for line in _wrapped(str(item))]
    return "\n".join(lines).replace("\\", "/") + '\n"""\n'


def _wrapped(sentence: str) -> list[str]:
    """A list item in lines of at most 98 characters; no quotes that could end the docstring."""
    lines, line = [], "*"
    for word in sentence.replace('"', "'").split():
        if len(line) + len(word) > 97:
            lines.append(line)
            line = " "
        line += f" {word}"
    return [*lines, line]


def _imports(script: Script) -> str:
    nn = ["import importlib", "import importlib.util", "import inspect", "import os", "import sys"]
    before = []
    if script.mode == "ddp":
        before.append("from contextlib import nullcontext")
    before.append("from fnmatch import fnmatch")
    if script.full or script.cheap:
        before.append("from functools import partial")
    if script.chunks > 1:
        nn.insert(0, "import copy")
    lines = [*nn, *before, "", "import torch", "import torch.distributed as dist"]
    lines += ["from torch import nn", "from torch.distributed.device_mesh import DeviceMesh"]
    if script.mode == "fsdp":
        lines.append("from torch.distributed.fsdp import fully_shard")
    if script.stages:
        lines.append(f"from torch.distributed.pipelining import PipelineStage, {script.schedule}")
    names = ["DTensor"]
    if script.styles:
        names += ["Replicate", "Shard"] if script.sequence else ["Replicate"]
    lines.append(f"from torch.distributed.tensor import {', '.join(names)}")
    if script.styles:
        styles = {expression.partition("(")[0] for _, expression in script.styles}
        styles.add("ColwiseParallel")
        used = [*sorted(styles), "parallelize_module"]
        used += ["loss_parallel"] if script.vocabulary else []
        lines.append("from torch.distributed.tensor.parallel import (")
        lines += [f"    {name}," for name in sorted(used)]
        lines.append(")")
    if script.mode == "ddp":
        lines.append("from torch.nn.parallel import DistributedDataParallel")
    if script.full or script.cheap:
        more = ", create_selective_checkpoint_contexts" if script.cheap else ""
        lines.append(f"from torch.utils.checkpoint import checkpoint{more}")
    return "\n".join(lines) + "\n"


def _constants(script: Script) -> str:
    sizes = ", ".join(
        f"{name} {size}"
        for name, size in zip(("pipeline", "replicate", "shard", "tensor"), script.degrees,
                              strict=True)
    )  # fmt: skip
    lines = [
        "",
        f"# Ranks by axis: {sizes}.",
        f"MESH = {script.mesh}",
        f"DATA = {script.degrees[1] * script.degrees[2]}  # ranks among which the batch is divided",
        f"MICROBATCHES = {script.microbatches}",
    ]
    if script.mode == "fsdp":
        after = "freed after use" if script.reshard else "kept from forward to backward"
        lines += [f'LAYERS = ["{script.layers}"]', f"RESHARD = {script.reshard}  # {after}"]
    if script.stages:
        lines += ["STAGES = [  # modules of each stage"]
        lines += [f"    {_names(names)}," for names in script.stages]
        lines.append("]")
    if script.styles:
        lines += ["TENSOR = {  # how tensor ranks divide modules"]
        lines += [f'    "{name}": {expression},' for name, expression in script.styles]
        lines += ["}", f"VOCABULARY = {script.vocabulary}  # whether the logits are divided"]
    if script.sums:
        lines.append(f"TENSOR_SUMS = {_names(script.sums)}  # partial gradients on tensor ranks")
    if script.sequence:
        first, last, gathered = script.sequence
        lines += [
            f'SEQUENCE_FIRST, SEQUENCE_LAST = "{first}", "{last}"',
            f"SEQUENCE_GATHERED = {_names(gathered)}",
        ]
    if script.full:
        lines.append(f"RECOMPUTED = {_names(script.full)}")
    if script.cheap:
        lines.append(f"RECOMPUTED_CHEAP = {_names(script.cheap)}")
    return "\n".join(lines) + "\n"


def _names(names: tuple[str, ...]) -> str:
    """A list of strings in Python, broken where it is long."""
    items = [f'"{name}"' for name in names]
    flat = "[" + ", ".join(items) + "]"
    if len(flat) < 88:
        return flat
    return "[\n" + "".join(f"        {item},\n" for item in items) + "    ]"


def _trainer(script: Script) -> str:
    """The class that trains: what every rank makes, and a step."""
    return "".join(
        f"{line}\n" if line else "\n"
        for line in ["", "", *_made(script), "", *_step(script), "", *_run(script)]
    )


def _made(script: Script) -> list[str]:
    lines = [
        "class Trainer:",
        '    """A rank\'s part: `step` takes the global batch and gives the global loss."""',
        "",
        "    def __init__(self, model, loss_fn=None, optimizer=torch.optim.AdamW, **options):",
        "        if not dist.is_initialized():",
        "            dist.init_process_group()",
        "        if dist.get_world_size() != MESH.numel():",
        '            raise SystemExit(f"the plan is for {MESH.numel()} ranks")',
        '        self.device = torch.device("cpu")',
        "        if torch.cuda.is_available():",
        '            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))',
        "            torch.cuda.set_device(self.device)",
        '        names = ("pipeline", "replicate", "shard", "tensor")',
        "        self.mesh = DeviceMesh(self.device.type, MESH, mesh_dim_names=names)",
        "        self.place = self.mesh.get_coordinate()",
        "        self.signature = inspect.signature(model.forward)",
    ]
    if script.styles or script.stages:
        lines.append("        ties = tied_names(model)")
    if script.stages:
        model = "copy.deepcopy(model)" if script.chunks > 1 else "model"
        lines += [
            f"        self.parts = {{at: Part({model}, loss_fn, at) for at in self.own_stages()}}",
            "        for part in self.parts.values():",
            "            part.to(self.device)",
        ]
        pad = " " * 12
    else:
        lines += [
            "        part = Part(model, loss_fn).to(self.device)",
            "        self.parts = {0: part}",
        ]
        pad = " " * 8
    if script.styles:
        lines.append(f'{pad}split_tensors(part.model, self.mesh["tensor"], ties)')
    if script.sequence:
        lines.append(f'{pad}split_sequence(part.model, self.mesh["tensor"])')
    if script.full:
        lines.append(f"{pad}recompute(part.model)")
    if script.cheap:
        lines.append(f"{pad}recompute_cheap(part.model)")
    if script.mode == "fsdp":
        axes = '"replicate", "shard"' if script.degrees[1] > 1 else '"shard"'
        lines.append(f"{pad}shard_parameters(part, self.mesh[{axes}])")
    if script.mode == "ddp":
        group = 'self.mesh.get_group("replicate")'
        lines.append(f"        self.ddp = DistributedDataParallel(part, process_group={group})")
    if script.stages:
        lines += _schedule(script)
    return [
        *lines,
        "        # An optimizer updates tensors of one mesh at a time.",
        "        groups = {}",
        "        for parameter in (p for part in self.parts.values() for p in part.parameters()):",
        "            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None",
        "            groups.setdefault(mesh, []).append(parameter)",
        '        groups = [{"params": group} for group in groups.values()]',
        "        self.optimizer = optimizer(groups, **options) if groups else None",
    ]


def _schedule(script: Script) -> list[str]:
    stages = "stages" if script.chunks > 1 else "stages[0]"
    ranks = script.degrees[0]
    fold = f"min(stage, {2 * ranks - 1} - stage)" if script.fold else f"stage % {ranks}"
    return [
        f"        self.shared = shared_parameters(self.parts, ties, lambda stage: {fold})",
        '        group = self.mesh.get_group("pipeline")',
        "        stages = [",
        "            PipelineStage(part, at, len(STAGES), self.device, group=group)",
        "            for at, part in self.parts.items()",
        "        ]",
        f"        self.schedule = {script.schedule}(",
        f"            {stages}, MICROBATCHES, loss_fn=lambda loss, _: loss",
        "        )",
    ]


def _step(script: Script) -> list[str]:
    lines = []
    if script.stages:
        ranks = script.degrees[0]
        if script.fold:
            own = f"(self.place[0], {2 * ranks - 1} - self.place[0])"
        else:
            own = f"range(self.place[0], len(STAGES), {ranks})"
        lines += [
            "    def own_stages(self):",
            '        """Numbers of this rank\'s stages."""',
            f"        return {own}",
            "",
        ]
    lines += [
        "    def mine(self, value):",
        '        """This rank\'s part of an input: its samples."""',
        "        if not isinstance(value, torch.Tensor) or not value.ndim:",
        "            return value",
        "        if len(value) % (DATA * MICROBATCHES):",
        '            raise ValueError(f"{len(value)} samples, {DATA} ranks, {MICROBATCHES} parts")',
        f"        place = self.place[1] * {script.degrees[2]} + self.place[2]",
        "        return value.chunk(DATA)[place].to(self.device)",
        "",
        "    def step(self, *args, **kwargs):",
        '        """One update; the mean of the ranks\' losses."""',
        "        inputs = {}",
        "        for name, value in self.signature.bind(*args, **kwargs).arguments.items():",
        "            more = self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD",
        "            inputs |= value if more else {name: value}",
        "        inputs = {name: self.mine(value) for name, value in inputs.items()}",
    ]
    if script.vocabulary:
        lines += ["        with loss_parallel():", "            loss = self.run(inputs)"]
    else:
        lines.append("        loss = self.run(inputs)")
    lines += _gradients(script)
    return [
        *lines,
        "        if self.optimizer is not None:",
        "            self.optimizer.step()",
        "            self.optimizer.zero_grad()",
        '        for axis in ("pipeline", "replicate", "shard"):',
        "            dist.all_reduce(loss, group=self.mesh.get_group(axis))",
        "        return loss.item() / DATA",
    ]


def _gradients(script: Script) -> list[str]:
    """What is still to be summed after backward."""
    lines = []
    if script.mode == "sum":
        lines += [
            "        for part in self.parts.values():",
            "            for parameter in part.parameters():",
            "                if parameter.grad is not None:",
            "                    gradient = local(parameter.grad)",
            '                    dist.all_reduce(gradient, group=self.mesh.get_group("replicate"))',
            "                    gradient /= DATA",
        ]
    if script.sums:
        lines += [
            "        for part in self.parts.values():",
            "            for name, module in part.model.named_modules():",
            "                if matches(name, TENSOR_SUMS):",
            "                    for parameter in module.parameters():",
            '                        group = self.mesh.get_group("tensor")',
            "                        dist.all_reduce(local(parameter.grad), group=group)",
        ]
    if script.stages:
        lines += [
            "        for copies, group in self.shared:",
            "            gradients = [settled(parameter) for parameter in copies]",
            "            total = sum(gradients)",
            "            dist.all_reduce(total, group=group)",
            "            for gradient in gradients:",
            "                gradient.copy_(total)",
        ]
    return lines


def _run(script: Script) -> list[str]:
    if script.stages:
        return [
            "    def run(self, inputs):",
            '        """All microbatches; the loss on ranks of the last stage, else zero."""',
            "        samples = next(v for v in inputs.values() if isinstance(v, torch.Tensor))",
            "        losses, ends = [], len(STAGES) - 1 in self.parts",
            "        self.schedule.step(",
            "            *([samples] if 0 in self.parts else []),",
            "            target=samples if ends else None,",
            "            losses=losses if ends else None,",
            "            return_outputs=False,",
            '            **{f"in_{name}": value for name, value in inputs.items()},',
            "        )",
            "        none = torch.zeros((), device=self.device)",
            "        return torch.stack(losses).mean().detach() if ends else none",
        ]
    lines = [
        "    def run(self, inputs):",
        '        """Forward and backward of all microbatches; their mean loss."""',
        "        total = 0.0",
        "        for number in range(MICROBATCHES):",
        "            batch = {",
        "                name: value.chunk(MICROBATCHES)[number]",
        "                if isinstance(value, torch.Tensor) and value.ndim",
        "                else value",
        "                for name, value in inputs.items()",
        "            }",
    ]
    if script.mode == "fsdp" and script.late and script.microbatches > 1:
        lines.append(
            "            self.parts[0].set_requires_gradient_sync(number == MICROBATCHES - 1)"
        )
    if script.mode == "ddp":
        lines += [
            "            last = number == MICROBATCHES - 1",
            "            with nullcontext() if last else self.ddp.no_sync():",
            "                loss = self.ddp(**batch) / MICROBATCHES",
            "                loss.backward()",
        ]
    else:
        lines += [
            "            loss = self.parts[0](**batch) / MICROBATCHES",
            "            loss.backward()",
        ]
    return [*lines, "            total = total + loss.detach()", "        return total"]
