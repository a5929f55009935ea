"""The JSON Schema of plan files, made of the same annotations that they are read by.

``schema.json`` beside this module is its text, for editors and other tools:
``python -m autopar.plan.schema > autopar/plan/schema.json`` writes it anew.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.plan.plan import SCHEMA_VERSION, Plan
from autopar.plan.shapes import LARGEST, Range, hints_of

FILE = Path(__file__).with_name("schema.json")
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The JSON Schema of plan files of the present version."""
    definitions: dict[str, Any] = {}
    found = _object(Plan, definitions)
    found["properties"]["schema_version"] = {
        "const": SCHEMA_VERSION,
        "description": "Version of the file's form.",
    }
    return {
        "$schema": _DIALECT,
        "title": f"autopar plan, version {SCHEMA_VERSION}",
        **found,
        "$defs": definitions,
    }


def schema_text() -> str:
    """The same as text."""
    return json.dumps(json_schema(), indent=1) + "\n"


def _object(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    words = attributes(kind)
    properties = {}
    for name, hint in hints_of(kind).items():
        made = _of(hint, definitions)
        properties[name] = {**made, "description": words[name]} if name in words else made
    return {
        "description": inspect.cleandoc(kind.__doc__ or "").partition("\n")[0],
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def attributes(kind: type) -> dict[str, str]:
    """What the docstring of a dataclass says of its fields."""
    text = inspect.cleandoc(kind.__doc__ or "").partition("\nAttributes:\n")[2]
    text = text.partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in found}


def _of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    allowed = Range()
    if typing.get_origin(hint) is typing.Annotated:
        hint, allowed = typing.get_args(hint)
    if hint in (int, float):
        kind = "integer" if hint is int else "number"
        limits = {"minimum": allowed.low} if allowed.low > -LARGEST else {}
        return {"type": kind, **limits}
    if hint in (str, bool):
        return {"type": "string" if hint is str else "boolean"}
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        name = hint.__name__
        if name not in definitions:
            definitions[name] = {}  # so that it keeps its place
            definitions[name] = _object(hint, definitions)
        return {"$ref": f"#/$defs/{name}"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_of(item, definitions) for item in arguments if item is not type(None)]
                + [{"type": "null"}]}  # fmt: skip
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _of(arguments[1], definitions)}
    assert origin is tuple, hint
    if arguments[-1] is Ellipsis:
        return {"type": "array", "items": _of(arguments[0], definitions)}
    return {
        "type": "array",
        "prefixItems": [_of(item, definitions) for item in arguments],
        "items": False,
        "minItems": len(arguments),
    }


if __name__ == "__main__":
    sys.stdout.write(schema_text())
