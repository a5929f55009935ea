"""What an operator's schema says about a call."""

from __future__ import annotations

from typing import Any

import torch

from autopar.graph.mutations import changes_view, is_inplace


class Signature:
    """Argument order and defaults of an operator, and what it writes."""

    def __init__(self, target: Any) -> None:
        arguments = target._schema.arguments
        written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        self.out = written == ["out"]
        first = arguments[0].name if arguments else ""
        inplace = is_inplace(str(target)) or changes_view(str(target))
        known = self.out or (written == [first] and inplace and str(arguments[0].type) == "Tensor")
        self.refused = bool(written) and not known
        self.plain = _without_out(target) if self.out else None
        self.positional = [arg for arg in arguments if not arg.kwarg_only]
        self.keywords = [arg for arg in arguments if arg.kwarg_only]

    def normalise(self, node: torch.fx.Node) -> tuple[list[Any], list[tuple[str, Any]]]:
        """All positional arguments of a call, and the keyword-only ones that are not default."""
        args = list(node.args)
        for arg in self.positional[len(args) :]:
            args.append(node.kwargs.get(arg.name, arg.default_value))
        kwargs = [
            (arg.name, node.kwargs[arg.name])
            for arg in self.keywords
            if arg.name in node.kwargs and node.kwargs[arg.name] != arg.default_value
        ]
        return args, kwargs


def _without_out(target: Any) -> str | None:
    """The overload that returns what ``target``, with its ``out`` argument, writes."""
    packet = target.overloadpacket
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments if a.name != "out"]
    for name in packet.overloads():
        found = getattr(packet, name)
        own = [(a.name, str(a.type)) for a in found._schema.arguments]
        if own == wanted and not found._schema.is_mutable and len(found._schema.returns) == 1:
            return str(found)
    return None
