"""Full initial weights, the same under every plan and on every rank."""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.runtime.comm import Communicator

# Torch's default generator is one per process, and ranks may be threads of one.
_SEEDED = threading.Lock()


def _module_seed(seed: int, path: str) -> int:
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def materialise(model: nn.Module, seed: int = 0) -> nn.Module:
    """A copy of a model on the meta device with real, initialised weights on the CPU.

    Every module that holds parameters or buffers of its own is initialised by its
    ``reset_parameters()`` under a seed made from `seed` and its path, so that weights depend
    neither on the plan nor on the order of initialisation. Tied parameters stay tied.

    Args:
        model: A model with all its tensors on the meta device.
        seed: The seed.

    Returns:
        The new model; `model` is not touched.

    Raises:
        InputError: If a module with tensors of its own has no ``reset_parameters``.
    """
    real = copy.deepcopy(model)
    shared: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in real.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                shared.setdefault(id(parameter), []).append((module, name))
    real.to_empty(device="cpu")
    for places in shared.values():
        first, first_name = places[0]
        for module, name in places[1:]:
            module._parameters[name] = first._parameters[first_name]
    for path, module in real.named_modules():
        held = (*module._parameters.items(), *module._buffers.items())
        own = [name for name, tensor in held if tensor is not None]
        if not own:
            continue
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise InputError(
                f"module {path or '(root)'} ({type(module).__name__}) is on the meta device and "
                f"cannot be initialised: it holds {own[0]} and has no reset_parameters()",
                fix="give the class a reset_parameters() method, or build the model on the CPU",
                where=path or "(root)",
            )
        with _SEEDED, torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(_module_seed(seed, path))
            reset()
    return real


def broadcast_from_first(tensors: Mapping[str, Tensor], comm: Communicator) -> dict[str, Tensor]:
    """`tensors` as rank 0 has them; every rank must call with equal names and shapes."""
    if comm.world_size == 1:
        return dict(tensors)
    ranks = tuple(range(comm.world_size))
    return {
        name: comm.broadcast(tensor.detach().to(comm.device), ranks, 0)
        for name, tensor in tensors.items()
    }
