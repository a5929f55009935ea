"""Special lowerings: what an op does when a letter is split where algebra ends.

Each function takes a `SpecialCall` and the local operands and gives the local results.
"""

from autopar.runtime.special import (  # noqa: F401  (imported to register)
    attention,
    embedding,
    losses,
    norm,
    position,
    random,
    reduction,
    routing,
)
from autopar.runtime.special.base import (
    SPECIALS,
    Axes,
    LetterSplit,
    SpecialCall,
    special,
    special_for,
)
from autopar.runtime.special.bind import bind_special

__all__ = [
    "SPECIALS",
    "Axes",
    "LetterSplit",
    "SpecialCall",
    "bind_special",
    "special",
    "special_for",
]
