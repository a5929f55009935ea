"""Ops that make tensors from numbers."""

from __future__ import annotations

from autopar.sharding.rule import OpRule
from autopar.sharding.rules.call import Call, family
from autopar.sharding.rules.pointwise import aten

_SIZED = {"full": 0, "zeros": 0, "ones": 0, "empty.memory_format": 0} | {
    f"new_{kind}": 1 for kind in ("zeros", "ones", "full", "empty")
}


def _make_sized(name: str, position: int) -> None:
    def of_call(call: Call) -> OpRule:
        """Every dim is a letter of the output alone."""
        names = call.names("d", call.outputs[0].ndim)
        return call.build({}, [names], size_arg=("args", position))

    family(aten(name))(of_call)


for _name, _position in _SIZED.items():
    _make_sized(_name, _position)


@family(
    aten(
        "arange arange.start arange.start_step linspace logspace eye eye.m tril_indices "
        "triu_indices scalar_tensor hann_window hamming_window blackman_window bartlett_window"
    )
)
def _whole(call: Call) -> OpRule:
    """The value depends on the position: made whole, sliced where a part is wanted."""
    return OpRule(letters=())
