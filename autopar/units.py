"""Units: SI inside, readable text at the border.

Quantities are seconds, bytes and flops everywhere; only loaders and printers convert, here.
"""

from __future__ import annotations

KB = 10**3
MB = 10**6
GB = 10**9
TB = 10**12
KIB = 2**10
MIB = 2**20
GIB = 2**30
TIB = 2**40

_BYTE_UNITS = {
    "B": 1,
    "KB": KB,
    "MB": MB,
    "GB": GB,
    "TB": TB,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": TIB,
}


def format_bytes(size_bytes: float) -> str:
    """`size_bytes` with a decimal unit and three significant digits.

    Example:
        >>> format_bytes(1_536_000)
        '1.54 MB'
    """
    for unit, scale in (("TB", TB), ("GB", GB), ("MB", MB), ("kB", KB)):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:.3g} {unit}"
    return f"{size_bytes:.0f} B"


def format_seconds(time_s: float) -> str:
    """`time_s` with the unit that suits it and three significant digits.

    Example:
        >>> format_seconds(0.0123)
        '12.3 ms'
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(time_s) >= scale:
            return f"{time_s / scale:.3g} {unit}"
    return f"{time_s / 1e-9:.3g} ns"


def format_count(count: float) -> str:
    """`count` with a letter for thousands, millions, billions, trillions.

    Example:
        >>> format_count(3_170_304)
        '3.17M'
    """
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(count) >= scale:
            return f"{count / scale:.3g}{unit}"
    return f"{count:.0f}"


def counted(number: int, word: str) -> str:
    """A number and what it counts.

    Args:
        number: The number.
        word: The singular; of several words the one before ``of``, or the last, gets its plural.

    Example:
        >>> counted(1_024, "rank"), counted(1, "pattern of ops"), counted(2, "microbatch")
        ('1,024 ranks', '1 pattern of ops', '2 microbatches')
    """
    if number != 1:
        head, of, rest = word.partition(" of ")
        word = head + ("es" if head.endswith(("ch", "sh", "s", "x")) else "s") + of + rest
    return f"{number:,} {word}"


def parse_bytes(text: str) -> int:
    """Bytes meant by text such as ``"80GiB"``, ``"1.5 GB"`` or ``"4096"``.

    Raises:
        ValueError: If the number or the unit is not understood.
    """
    cleaned = text.strip()
    digits = cleaned.rstrip("BKMGTIbkmgti ")
    unit = cleaned[len(digits) :].strip().upper() or "B"
    if unit not in _BYTE_UNITS:
        raise ValueError(f"unknown unit in {text!r}: expected one of {', '.join(_BYTE_UNITS)}")
    try:
        return round(float(digits) * _BYTE_UNITS[unit])
    except ValueError:
        raise ValueError(f"no number in {text!r}: expected for example '80GiB'") from None
