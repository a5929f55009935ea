"""The model a user trains: traced, planned and lowered on first use."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError, PlanError, RankError
from autopar.plan.build import apply_plan, make_plan
from autopar.plan.fingerprint import fingerprint
from autopar.plan.plan import Plan
from autopar.plan.strategies import default_mesh, strategy_name
from autopar.runtime.comm import Communicator
from autopar.runtime.engine import Engine
from autopar.runtime.execution import Execution
from autopar.runtime.float64 import in_float64
from autopar.runtime.initialise import broadcast_from_first, materialise
from autopar.runtime.mesh import MeshContext
from autopar.runtime.operators import refuse_unkeyed_random
from autopar.runtime.optimizers import Factory, optimizer_factory
from autopar.schedules.chrome import Recording
from autopar.sharding.mesh import Mesh
from autopar.sharding.sharded import ShardedGraph
from autopar.trace import Traced, trace


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """What `autopar.compile` was asked for; see there.

    Attributes:
        planner: Makes the plan, on all ranks at the same time; None to follow the constraints.
        fit: Makes a plan for other inputs one for those of the first step, on all ranks alike;
            None to refuse it.
    """

    loss_fn: Callable[..., Any] | None = None
    optimizer: str | type[torch.optim.Optimizer] | Factory | None = "adamw"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mesh | None = None
    constraints: str | Mapping[str, object] | None = None
    plan: Plan | None = None
    strict: bool = False
    seed: int = 0
    check_finite: bool = True
    float64: bool = False
    planner: Callable[[Traced], Plan] | None = None
    fit: Callable[[Plan, Traced], Plan] | None = None


def make_placements(
    traced: Traced, world_size: int, options: CompileOptions
) -> tuple[Plan, ShardedGraph]:
    """The plan to run and its placements: the one given, else one made from the constraints.

    Raises:
        ClusterError: If the mesh does not match the number of ranks.
        PlanError: If plan or constraints do not fit the model.
    """
    if options.plan is not None:
        options.plan.device_mesh.check_world_size(world_size)
        plan = options.plan if options.fit is None else options.fit(options.plan, traced)
        sharded = apply_plan(plan, traced.graph)
        refuse_unkeyed_random(traced.graph, sharded.factors, world_size)
        return plan, sharded
    if options.planner is not None and traced.loss is not None:
        plan = options.planner(traced)
        plan.device_mesh.check_world_size(world_size)
        sharded = apply_plan(plan, traced.graph)
        refuse_unkeyed_random(traced.graph, sharded.factors, world_size)
        return plan, sharded
    mesh = options.mesh or default_mesh(strategy_name(options.constraints), world_size)
    mesh.check_world_size(world_size)
    plan, sharded = make_plan(
        traced.graph, mesh, options.constraints, strict=options.strict, notes=traced.notes
    )
    refuse_unkeyed_random(traced.graph, sharded.factors, world_size)
    return plan, sharded


def _digest(tensor: Tensor) -> bytes:
    """A hash of a tensor's values."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).digest()


class CompiledModel:
    """A model that trains under a plan. Made by `autopar.compile`.

    Every rank calls every method with the same arguments: inputs are those of the *global*
    batch, and results are whole, on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        options: CompileOptions,
        traced: Traced | None = None,
    ) -> None:
        self._model, self._comm, self._options = model, comm, options
        self._factory = optimizer_factory(options.optimizer, options.optimizer_options)
        self._traced = traced
        self._engine: Engine | None = None
        self._plan: Plan | None = options.plan
        self._pending: dict[str, Tensor] = {}
        self._batch_checked = False

    @property
    def plan(self) -> Plan:
        """The plan.

        Raises:
            PlanError: Before the first step, when no example inputs were given.
        """
        if self._plan is None:
            raise PlanError(
                "there is no plan yet: the model is traced with the inputs of the first step",
                fix="pass example_inputs=(...) to autopar.compile, or call step() first",
            )
        return self._plan

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """This rank's optimizer, over its local parameters; None before the first step."""
        return self._engine.optimizer if self._engine else None

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes this rank has sent, by kind of collective."""
        return dict(self._comm.traffic)

    def build(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Engine:
        """Trace, plan and lower with these inputs unless that was done; returns the engine."""
        if self._engine is not None:
            return self._engine
        options = self._options
        traced = self._traced or trace(self._model, args, dict(kwargs), options.loss_fn)
        self._plan, sharded = make_placements(traced, self._comm.world_size, options)
        if options.float64:  # after planning: a plan is for the model as the user wrote it
            traced = in_float64(traced)
            sharded = replace(sharded, graph=traced.graph)
        self._traced = traced
        self._check_ranks_agree(traced)
        execution = Execution.of_plan(self._plan, sharded, traced.loss)
        context = MeshContext.create(sharded.mesh, self._comm, execution.devices)
        tensors = broadcast_from_first(self._initial(traced), self._comm)
        self._engine = Engine(
            sharded,
            context,
            {**tensors, **traced.constants},
            loss=traced.loss,
            execution=execution,
            custom=self._custom,
            optimizer=self._factory,
            seed=options.seed,
            check_finite=options.check_finite,
        )
        if self._pending:
            self.load_state_dict(self._pending)
            self._pending = {}
        return self._engine

    def _custom(self, op: str) -> Callable[..., Any]:
        assert self._traced is not None
        return self._traced.custom[op.removeprefix("autopar.custom_function.")]

    def _check_ranks_agree(self, traced: Traced) -> None:
        mine = (fingerprint(traced.graph), self.plan.to_json())
        for rank, other in enumerate(self._comm.gather_objects(mine)):
            for what, have, theirs in zip(("model and inputs", "plan"), mine, other, strict=True):
                if have != theirs:
                    raise RankError(
                        f"rank {self._comm.rank} and rank {rank} have a different {what}",
                        fix="give every rank the same model, global batch and plan",
                        where=f"rank {self._comm.rank}",
                    )

    def _check_same_batch(self, inputs: Mapping[str, Tensor]) -> None:
        """Refuse a first batch that the ranks do not share, as if each had a part of its own."""
        self._batch_checked = True
        if self._comm.world_size == 1:
            return
        mine = {name: _digest(tensor) for name, tensor in inputs.items()}
        assert self._traced is not None
        paths = {item.value.name: item.target for item in self._traced.graph.inputs}
        for rank, other in enumerate(self._comm.gather_objects(mine)):
            for name, digest in mine.items():
                if other[name] != digest:
                    raise RankError(
                        f"rank {self._comm.rank} and rank {rank} were given a different "
                        f"{paths[name]}",
                        expected="the global batch, whole and equal on every rank",
                        fix="load the same batch on every rank (same seed, no distributed "
                        "sampler); the plan decides which rank works on which part",
                        where=paths[name],
                    )

    def _initial(self, traced: Traced) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {**traced.parameters, **traced.buffers}
        if any(tensor.is_meta for tensor in tensors.values()):
            real = materialise(self._model, self._options.seed)
            named = dict(real.named_parameters(remove_duplicate=False))
            named_buffers = dict(real.named_buffers(remove_duplicate=False))
            tensors = {name: named.get(name, named_buffers.get(name)) for name in tensors}  # type: ignore[misc]
        if self._options.float64:
            tensors = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
        return tensors

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of a call by graph value, checked against what was traced."""
        assert self._traced is not None
        leaves = self._traced.flatten_inputs(args, dict(kwargs))
        names = [item.value.name for item in self._traced.graph.inputs if item.kind == "input"]
        if self._options.float64:
            leaves = [leaf.double() if leaf.is_floating_point() else leaf for leaf in leaves]
        return dict(zip(names, leaves, strict=True))

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """One training step on a global batch.

        Args:
            *args: The model's arguments, whole and equal on every rank.
            **kwargs: The model's keyword arguments.

        Returns:
            The loss over the global batch, detached.

        Raises:
            InputError: If an input differs from what the model was traced with.
            RankError: In the first step, if the ranks were given different batches.
            NonFiniteError: On every rank, when the loss is NaN or infinite.
        """
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise InputError(
                "step() was called under torch.no_grad() or torch.inference_mode()",
                fix="call step() outside of it; for outputs alone call the compiled model itself",
            )
        engine = self.build(args, kwargs)
        engine.check_trainable()
        inputs = self.inputs(args, kwargs)
        if not self._batch_checked:
            self._check_same_batch(inputs)
        return engine.step(inputs)

    def profile(self, *args: Any, **kwargs: Any) -> Recording:
        """One training step on a global batch, measured: a real one, as `step` takes it.

        If no step was taken yet, one is taken before, as the first of all compiles programs.

        Args:
            *args: See `step`.
            **kwargs: See `step`.

        Returns:
            When each action and collective of every rank began and ended; the same on all ranks.
            ``autopar report PLAN --measured FILE`` lays what ``save(FILE)`` writes over the
            prediction, ``autopar profile --from FILE`` mends the cluster's figures with it.

        Raises:
            InputError: See `step`.
            NonFiniteError: See `step`.
        """
        from autopar.runtime.profiling import record_step

        engine = self.build(args, kwargs)
        if not engine.num_steps:
            self.step(*args, **kwargs)
        engine.check_trainable()
        return record_step(engine, self.inputs(args, kwargs), self.plan)[1]

    def gradients(self, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Loss and full gradients by FQN of a global batch, without an optimizer step."""
        engine = self.build(args, kwargs)
        loss = engine.backward(self.inputs(args, kwargs))
        return loss, engine.full_gradients()

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs on a global batch, whole, in the model's own structure.

        The model runs in the mode (train or eval) in which it was traced. Buffers are not
        updated.
        """
        engine = self.build(args, kwargs)
        traced = self._traced
        assert traced is not None
        values = engine.forward(self.inputs(args, kwargs))
        leaves = [
            values[out.value] if out.value else out.literal
            for out in traced.graph.outputs
            if out.kind == "user"
        ]
        return traced.unflatten_outputs(leaves)

    def state_dict(self) -> dict[str, Tensor]:
        """Full parameters and persistent buffers under the user's FQNs; every rank must call.

        Raises:
            PlanError: Before the first step, when no example inputs were given.
        """
        _ = self.plan
        if self._engine is None or self._traced is None:
            raise PlanError(
                "the model is not compiled yet", fix="call step() first, or pass example_inputs"
            )
        held = {**self._engine.full_parameters(), **self._engine.full_buffers()}
        aliases = self._traced.aliases
        return {
            name: held[aliases.get(name, name)].cpu()
            if aliases.get(name, name) in held
            else tensor.detach().clone()
            for name, tensor in self._model.state_dict(keep_vars=True).items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take full tensors under the user's FQNs, as `state_dict` gives them.

        Raises:
            InputError: For a missing, unexpected or mis-shaped key; names the first.
        """
        want = self._model.state_dict(keep_vars=True)
        if not isinstance(state, Mapping):
            raise InputError(
                f"the state dict is of type {type(state).__name__}",
                expected="a map from FQN to tensor",
            )
        for name, tensor in want.items():
            if name not in state:
                raise InputError(f"the state dict lacks {name}", where=name)
            if not isinstance(state[name], Tensor):
                raise InputError(
                    f"{name} is of type {type(state[name]).__name__} in the state dict",
                    expected=f"a tensor of shape {tuple(tensor.shape)}",
                    where=name,
                )
            if tuple(state[name].shape) != tuple(tensor.shape):
                raise InputError(
                    f"{name} has shape {tuple(state[name].shape)} in the state dict",
                    expected=str(tuple(tensor.shape)),
                    where=name,
                )
        for name in state:
            if name not in want:
                raise InputError(f"the model has no tensor {name}", where=name)
        if self._engine is None or self._traced is None:
            self._pending = dict(state)
            return
        aliases = self._traced.aliases
        self._engine.load({aliases.get(name, name): tensor for name, tensor in state.items()})

    def print_readable(self) -> str:
        """This rank's programs as text: every op and collective, forward and backward."""
        if self._engine is None:
            raise PlanError("the model is not compiled yet", fix="call step() first")
        return self._engine.print_readable()
