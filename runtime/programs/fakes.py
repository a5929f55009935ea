"""Results of operators on fake tensors, remembered by what their operands look like.

A model repeats the same operators on the same shapes, layer by layer, and what comes out of one has
then been seen before. torch keeps such a table too, but makes its key anew from every tensor and
asks for the device of each through the dispatcher: two thirds of the calls of a trace. Here the
looks of a tensor are noted once, when it appears.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.immutable_collections import immutable_list

DEVICE = torch.ops.prim.device.default
_VALUE_TAGS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
_PLAIN = (bool, float, str, type(None), torch.dtype, torch.device, torch.layout)
_SEQUENCES = frozenset((list, tuple, torch.Size, immutable_list))
_LIMIT = 50_000

Look = tuple[Any, ...]
"""Dtype, shape, strides, offset and device of a tensor."""


class _Unknown(Exception):  # noqa: N818 - not an error
    """Something in a call that cannot be part of a key."""


@dataclass(frozen=True, slots=True)
class _Result:
    """One tensor that an operator gives.

    Attributes:
        look: What it looks like.
        base: Number of the tensor operand in whose memory it lies; -1 if its memory is new.
    """

    look: Look
    base: int


_KNOWN: dict[Any, tuple[bool, tuple[_Result | None, ...]]] = {}
_PURE: dict[Any, bool] = {}


def look(tensor: FakeTensor) -> Look:
    """What `tensor` looks like."""
    return (
        tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(),
        tensor.fake_device,
    )  # fmt: skip


def _pure(func: Any) -> bool:
    """Whether the look of an operator's results follows from that of its operands."""
    found = _PURE.get(func)
    if found is None:
        schema = getattr(func, "_schema", None)
        found = _PURE[func] = (
            schema is not None
            and schema.name.startswith("aten::")
            and not schema.is_mutable
            and not _VALUE_TAGS & set(func.tags)
        )
    return found


class Memo:
    """The table, as one trace uses it.

    Args:
        mode: The fake mode of all its tensors.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._looks: dict[int, Look] = {}

    def note(self, tensor: Any) -> None:
        """Remember what a tensor of the trace looks like; it must live as long as the trace."""
        if (
            type(tensor) is FakeTensor
            and tensor.fake_mode is self.mode
            and tensor.constant is None
            and tensor.layout is torch.strided
            and not (tensor.is_conj() or tensor.is_neg())
        ):
            self._looks[id(tensor)] = look(tensor)

    def key(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, list[FakeTensor]] | None:
        """What decides the results of a call, and its tensors in order; None if nobody can say."""
        if not _pure(func):
            return None
        tensors: list[FakeTensor] = []
        try:
            parts = self._parts(args, tensors)
            named = self._parts(kwargs.values(), tensors) if kwargs else ()
        except _Unknown:
            return None
        return (func, torch.get_default_dtype(), parts, tuple(kwargs), named), tensors

    def _parts(self, values: Iterable[Any], tensors: list[FakeTensor]) -> tuple[Any, ...]:
        found: list[Any] = []
        for value in values:
            kind = type(value)
            if kind is int:
                found.append(value)
            elif kind is FakeTensor:
                seen = self._looks.get(id(value))
                if seen is None:
                    raise _Unknown
                tensors.append(value)
                found.append(seen)
            elif kind in _SEQUENCES:
                found.append((issubclass(kind, list), self._parts(value, tensors)))
            elif kind in _PLAIN or kind is torch.memory_format:
                found.append((kind, value))  # 1, 1.0 and True are not the same
            else:
                raise _Unknown
        return tuple(found)

    def recall(self, key: Any, tensors: list[FakeTensor]) -> Any | None:
        """The results of a call that has been seen before; None if it has not."""
        known = _KNOWN.get(key)
        if known is None:
            return None
        many, results = known
        made = [None if result is None else self._make(result, tensors) for result in results]
        return tuple(made) if many else made[0]

    def _make(self, result: _Result, tensors: list[FakeTensor]) -> FakeTensor:
        dtype, shape, stride, offset, device = result.look
        with torch._C._DisableTorchDispatch():
            empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if result.base >= 0:
                empty.set_(tensors[result.base].untyped_storage(), offset, shape, stride)
            made = FakeTensor(self.mode, empty, device)
        self._looks[id(made)] = result.look
        return made

    def learn(self, key: Any, tensors: list[FakeTensor], result: Any) -> None:
        """Remember the results of a call, if their looks say all there is to know of them."""
        many = isinstance(result, tuple | list)
        found: list[_Result | None] = []
        places = {item.untyped_storage()._cdata: place for place, item in enumerate(tensors)}
        for item in result if many else (result,):
            if item is None:
                found.append(None)
                continue
            self.note(item)
            if id(item) not in self._looks or any(item is other for other in tensors):
                return
            storage = item.untyped_storage()
            base = places.setdefault(storage._cdata, -1)
            if base < 0 and not _exactly_its_own(item):
                return
            if base >= len(tensors):  # two results in one new memory
                return
            if base < 0:
                places[storage._cdata] = len(tensors)
            found.append(_Result(self._looks[id(item)], base))
        if len(_KNOWN) >= _LIMIT:
            _KNOWN.clear()
        _KNOWN[key] = (many, tuple(found))


def _exactly_its_own(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory as `torch.empty_strided` would."""
    span = 0
    if tensor.numel():
        span = 1 + sum(
            (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
    whole: int = tensor.untyped_storage().nbytes()
    return tensor.storage_offset() == 0 and whole == span * tensor.element_size()
