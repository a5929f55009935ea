"""Pieces of the script that `autopar.export.fsdp2` writes; a plan needs some of them."""

from __future__ import annotations

LOAD = '''

def load(target):
    """What the function of ``file.py:function`` or ``package.module:function`` returns."""
    path, _, name = target.rpartition(":")
    if path.endswith(".py"):
        spec = importlib.util.spec_from_file_location("model_file", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["model_file"] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(path)
    return getattr(module, name)()


def matches(name, patterns):
    """Whether a module path fits one of the patterns; ``*`` stands for one part of a path."""
    parts = name.split(".")
    return any(
        len(parts) == len(pattern.split(".")) and all(map(fnmatch, parts, pattern.split(".")))
        for pattern in patterns
    )


def local(tensor):
    """A rank's own part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tied_names(model):
    """Groups of parameter names that are one parameter."""
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]
'''

WHOLE = '''

class Part(nn.Module):
    """The model and its loss."""

    def __init__(self, model, loss_fn):
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, **inputs):
        return loss_of(self.model(**inputs), self.loss_fn, inputs)
'''

LOSS = '''

def loss_of(output, loss_fn, inputs):
    """The loss that a model returns, or that `loss_fn` makes of what it returns."""
    if loss_fn is not None:
        output = loss_fn(output, *inputs.values())
    elif not isinstance(output, torch.Tensor):
        output = output["loss"] if isinstance(output, dict) else output[0]
    return output.full_tensor() if isinstance(output, DTensor) else output
'''

STAGE = '''

class Skipped(nn.Module):
    """Stands for a module of another stage: gives what it gets."""

    def forward(self, value, *args, **kwargs):
        return value


class Unread(nn.Module):
    """Stands for an embedding of an earlier stage: gives zeros that nothing reads."""

    def __init__(self, embedding):
        super().__init__()
        self.width, self.dtype = embedding.embedding_dim, embedding.weight.dtype

    def forward(self, ids):
        return torch.zeros((), dtype=self.dtype, device=ids.device).expand(*ids.shape, self.width)


class Leave(Exception):
    """Carries what a stage sends on out of the model's forward."""


class Part(nn.Module):
    """A stage: the model's own forward, entered at the stage's first module, left at the next's."""

    def __init__(self, model, loss_fn, index):
        super().__init__()
        self.model, self.loss_fn, self.arrived = model, loss_fn, None
        for number, names in enumerate(STAGES):
            for name in names if number != index else ():
                module = model.get_submodule(name)
                early = number < index and isinstance(module, nn.Embedding)
                model.set_submodule(name, Unread(module) if early else Skipped())
        for name in unlisted(model) if index + 1 < len(STAGES) else ():
            model.set_submodule(name, Skipped())
        if index > 0:
            first = model.get_submodule(STAGES[index][0])
            first.register_forward_pre_hook(self.enter, with_kwargs=True)
        if index + 1 < len(STAGES):
            after = model.get_submodule(STAGES[index + 1][0])
            after.register_forward_pre_hook(self.leave, with_kwargs=True)

    def enter(self, module, args, kwargs):
        return ((self.arrived, *args[1:]), kwargs) if args else swap(kwargs, self.arrived)

    def leave(self, module, args, kwargs):
        raise Leave(args[0] if args else next(iter(kwargs.values())))

    def forward(self, arrived, **inputs):
        self.arrived = arrived
        inputs = {name.removeprefix("in_"): value for name, value in inputs.items()}
        try:
            output = self.model(**inputs)
        except Leave as left:
            return left.args[0]
        return loss_of(output, self.loss_fn, inputs)


def unlisted(model):
    """Modules that `STAGES` leaves out: output layers whose weight is that of an embedding."""
    listed = [name for names in STAGES for name in names]
    return [
        name
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
        and not any(f"{name}.".startswith(f"{other}.") for other in listed)
    ]


def swap(kwargs, value):
    """Arguments by name, the first of them replaced."""
    return (), kwargs | {next(iter(kwargs)): value}
'''

TENSOR = '''

def split_tensors(model, mesh, ties):
    """Tensor parallelism: `TENSOR`, and the same for outputs that share an embedding's weight."""
    tied = {name for group in ties for name in group}
    styles = {}
    for name, module in model.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        styles |= {name: style for pattern, style in TENSOR.items() if matches(name, [pattern])}
        if VOCABULARY and isinstance(module, nn.Linear) and f"{name}.weight" in tied:
            styles[name] = ColwiseParallel(use_local_output=False)
    parallelize_module(model, mesh, styles)
    for group in ties:  # parameters that were one are made one again
        here = [name for name in group if has_parameter(model, name)]
        for name in here[1:]:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, model.get_parameter(here[0]))


def has_parameter(model, name):
    """Whether a model, or what a stage has left of it, has a parameter."""
    try:
        model.get_parameter(name)
    except AttributeError:
        return False
    return True
'''

SEQUENCE = '''

def split_sequence(model, mesh):
    """Between tensor-parallel modules each rank holds a part of the sequence."""

    def first_changed(change):
        def hook(module, args, kwargs):
            if args:
                return (change(args[0]), *args[1:]), kwargs
            name = next(iter(kwargs))
            return (), kwargs | {name: change(kwargs[name])}

        return hook

    def spread(value, source, target):
        if not isinstance(value, DTensor):
            value = DTensor.from_local(value, mesh, [source], run_check=False)
        return value.redistribute(mesh, [target])

    for name, module in model.named_modules():
        if name == SEQUENCE_FIRST:
            change = lambda value: spread(value, Replicate(), Shard(1)).to_local()  # noqa: E731
            module.register_forward_pre_hook(first_changed(change), with_kwargs=True)
        elif name == SEQUENCE_LAST:
            module.register_forward_hook(
                lambda module, args, value: spread(value, Shard(1), Replicate()).to_local()
            )
        elif matches(name, SEQUENCE_GATHERED):
            change = lambda value: spread(value, Shard(1), Replicate())  # noqa: E731
            module.register_forward_pre_hook(first_changed(change), with_kwargs=True)
'''

RECOMPUTE = '''

def recompute(model):
    """Layers whose inside backward computes again."""
    for name, module in model.named_modules():
        if matches(name, RECOMPUTED):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
'''

SELECTIVE = '''

def recompute_cheap(model):
    """Layers of which backward keeps products with weights, and computes the rest again."""
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    context = partial(create_selective_checkpoint_contexts, kept)
    for name, module in model.named_modules():
        if matches(name, RECOMPUTED_CHEAP):
            module.forward = partial(
                checkpoint, module.forward, use_reentrant=False, context_fn=context
            )
'''

SHARD = '''

def shard_parameters(part, mesh):
    """ZeRO: each layer's parameters, gradients and optimizer state are divided."""
    for name, module in list(part.model.named_modules()):
        if matches(name, LAYERS) and any(True for _ in module.parameters()):
            fully_shard(module, mesh=mesh, reshard_after_forward=RESHARD)
    fully_shard(part, mesh=mesh, reshard_after_forward=RESHARD)
'''

SUM_TIED = '''

def shared_parameters(parts, ties, holder):
    """Parameters that several stages hold: this rank's copies, and the group of all holders."""
    found = []
    for names in ties:
        stages = [stage_of(name) for name in names]
        ranks = sorted({holder(stage) for stage in stages})
        own = [parts[at].model.get_parameter(n) for n, at in zip(names, stages) if at in parts]
        if len(set(stages)) == 1:
            continue
        for column in MESH.flatten(1).T:
            group = dist.new_group(column[ranks].tolist())
            if dist.get_rank() in column[ranks].tolist():
                found.append((own, group))
    return found


def settled(parameter):
    """A rank's part of a gradient, which is first laid out as its parameter is."""
    if isinstance(parameter.grad, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        parameter.grad = parameter.grad.redistribute(mesh, placements)
    return local(parameter.grad)


def stage_of(name):
    """The stage that holds a parameter; the last one has what `STAGES` leaves out."""
    for number, modules in enumerate(STAGES):
        if any(name.startswith(f"{module}.") for module in modules):
            return number
    return len(STAGES) - 1
'''

MAIN = """

def main():
    steps, learning_rate = 3, 3e-4
    torch.manual_seed(0)
    loaded = load(sys.argv[1])
    if not isinstance(loaded, dict):
        loaded = dict(zip(("model", "args", "kwargs"), loaded))
    trainer = Trainer(loaded["model"], loaded.get("loss_fn"), lr=learning_rate)
    for step in range(steps):
        loss = trainer.step(*loaded.get("args", ()), **loaded.get("kwargs", {}))
        if dist.get_rank() == 0:
            print(f"step {step + 1}  loss {loss:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
