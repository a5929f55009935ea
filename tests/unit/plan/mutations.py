"""Plan files, spoilt at random: where files of people, editors and disks go wrong."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 10**30, -(10**30), 2**63, 1e308, -1e-9, float("nan"),
    float("inf"), "", "whole", "x" * 5000, "\x1b[31mred", "\ud800", "\u202e", "\u00e9",
    "../../etc/passwd", "__import__('os').system('true')", "$(touch here)", "%s%n", [], {}, [[]],
    [None], {"a": 1}, {"__class__": "Plan"}, {"py/object": "os.system"}, "1e5", "heads@0:0x0",
    "heads@9:1x2", "batch@b0:1x4", [["pp", 2]], [["pp", 0]], [["pp", 2**40]], ["dp", "dp"],
)  # fmt: skip
"""What is put in place of other values."""
_TEXTS = ("NaN", "Infinity", "-0", "1e999", "9" * 5000, '"\\ud800"', "'x'", "", ",", "//", "\x00")
"""What is put into the text, whether or not it is JSON then."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything in JSON."""
    yield path
    entries = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        entries = enumerate(value)
    for key, item in entries:
        yield from places(item, (*path, key))


class Mutator:
    """Spoils a plan file, each time in another way.

    Args:
        texts: Whole plan files.
        seed: Of what is drawn.
    """

    def __init__(self, texts: list[str], seed: int) -> None:
        self.random = random.Random(seed)
        self.held = [json.loads(text) for text in texts]
        self.places = [[path for path in places(data) if path] for data in self.held]
        self.texts = texts

    def next(self) -> bytes:
        """A spoilt file."""
        number = self.random.randrange(len(self.held))
        if self.random.random() < 0.25:
            return self.random.choice(_BYTES)(self.random, self.texts[number])
        data = copy.deepcopy(self.held[number])
        for _ in range(self.random.choice((1, 1, 1, 2, 5))):
            path = self.random.choice(self.places[number])
            self.random.choice(_CHANGES)(self.random, data, path)
        text = json.dumps(data, indent=self.random.choice((None, 1)))
        return _twice(self.random, text).encode("utf-8", "surrogatepass")


def _holder(data: Any, path: tuple[Any, ...]) -> Any:
    """What holds the value at a path; None if another change has taken it away."""
    for key in path[:-1]:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return None
    key = path[-1]
    if isinstance(data, dict):
        return data if key in data else None
    return data if isinstance(data, list) and isinstance(key, int) and key < len(data) else None


def _drop(source: random.Random, data: Any, path: tuple[Any, ...]) -> None:
    if (holder := _holder(data, path)) is not None:
        del holder[path[-1]]


def _retype(source: random.Random, data: Any, path: tuple[Any, ...]) -> None:
    if (holder := _holder(data, path)) is not None:
        holder[path[-1]] = copy.deepcopy(source.choice(VALUES))


def _rename(source: random.Random, data: Any, path: tuple[Any, ...]) -> None:
    holder, key = _holder(data, path), path[-1]
    if isinstance(holder, dict):
        name = source.choice((key[::-1], key + "s", "", "\x1b]0;", "\ud83d", key.upper()))
        holder[name] = holder.pop(key)


def _reorder(source: random.Random, data: Any, path: tuple[Any, ...]) -> None:
    holder = _holder(data, path)
    if isinstance(holder, list):
        source.shuffle(holder)
    elif isinstance(holder, dict):
        items = list(holder.items())
        source.shuffle(items)
        holder.clear()
        holder.update(items)


def _repeat(source: random.Random, data: Any, path: tuple[Any, ...]) -> None:
    holder = _holder(data, path)
    if isinstance(holder, list):
        holder.extend(copy.deepcopy(holder) * source.choice((1, 1, 40)))


def _nudge(source: random.Random, data: Any, path: tuple[Any, ...]) -> None:
    holder = _holder(data, path)
    if holder is None:
        return
    value = holder[path[-1]]
    if type(value) in (int, float):
        factors = (-1, 0, 2, 3, 10**6, 10**15, 0.5)
        holder[path[-1]] = value * source.choice(factors)
    elif isinstance(value, str) and value:
        place = source.randrange(len(value))
        letter = source.choice("abz019@:x#/ *!.-\u00e9\n\x07")
        holder[path[-1]] = value[:place] + letter + value[place + source.randrange(2) :]


def _move(source: random.Random, data: Any, path: tuple[Any, ...]) -> None:
    """The value of another place."""
    if (holder := _holder(data, path)) is not None:
        key = source.choice(list(data)) if data else None
        holder[path[-1]] = copy.deepcopy(data[key]) if key is not None else None


def _deepen(source: random.Random, data: Any, path: tuple[Any, ...]) -> None:
    if (holder := _holder(data, path)) is not None:
        for _ in range(source.choice((1, 30, 200))):
            holder[path[-1]] = [holder[path[-1]]]


Change = Callable[[random.Random, Any, tuple[Any, ...]], None]
_CHANGES: tuple[Change, ...] = (
    _drop, _retype, _retype, _rename, _reorder, _repeat, _nudge, _nudge, _move, _deepen,
)  # fmt: skip


def _twice(source: random.Random, text: str) -> str:
    """Now and then a key a second time."""
    if source.random() > 0.1:
        return text
    places = [place for place in range(len(text)) if text.startswith('": ', place)]
    if not places:
        return text
    place = source.choice(places)
    start = text.rfind('"', 0, place)
    return f"{text[:start]}{text[start : place + 3]}null, {text[start:]}"


def _truncate(source: random.Random, text: str) -> bytes:
    data = text.encode()
    return data[: source.randrange(len(data))]


def _flip(source: random.Random, text: str) -> bytes:
    data = bytearray(text.encode())
    for _ in range(source.choice((1, 2, 20))):
        data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    return bytes(data)


def _insert(source: random.Random, text: str) -> bytes:
    place = source.randrange(len(text))
    return (text[:place] + source.choice(_TEXTS) + text[place:]).encode("utf-8", "surrogatepass")


def _encode(source: random.Random, text: str) -> bytes:
    return text.encode(source.choice(("utf-16", "utf-32-le", "utf-8-sig", "cp500")))


def _nest(source: random.Random, text: str) -> bytes:
    depth = source.choice((500, 2000, 100_000))
    open_, close = source.choice((("[", "]"), ('{"a":', "}")))
    return (open_ * depth + "1" + close * source.choice((0, depth))).encode()


def _swap(source: random.Random, text: str) -> bytes:
    """Two pieces of the text change places."""
    a, b, c = sorted(source.randrange(len(text)) for _ in range(3))
    return (text[:a] + text[b:c] + text[a:b] + text[c:]).encode()


_BYTES: tuple[Callable[[random.Random, str], bytes], ...] = (
    _truncate, _flip, _insert, _encode, _nest, _swap,
)  # fmt: skip
