"""The one exception type of pt2mx."""

import difflib
from collections.abc import Iterable, Sequence


class MXError(ValueError):
    """Bad input to pt2mx. The message names the value, what is allowed and what to do.

    Example:
        >>> import pt2mx
        >>> try:
        ...     pt2mx.MXSpec("mxfp4", block_size=0)
        ... except pt2mx.MXError as error:
        ...     print(error)
        block_size=0 must be an integer of at least 1
    """


def nearest(value: object, allowed: Iterable[str]) -> str:
    """Return a clause for an error message: the allowed spelling nearest to `value`, then all of them."""
    spellings = [str(a) for a in allowed]
    by_lower = {a.lower(): a for a in spellings}
    close = difflib.get_close_matches(str(value).lower(), by_lower, n=1, cutoff=0.4)
    hint = f"did you mean {by_lower[close[0]]!r}? " if close else ""
    return f"{hint}allowed: {', '.join(spellings)}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return names as text; of many only the first."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def check_integer(name: str, value: object, least: int = -(2**63), most: int = 2**63 - 1) -> None:
    """Raise an `MXError` unless a value is an integer in a range, and no bool; by default the range is that of int64.

    Args:
        name: of the value, for the message.
        value: the value.
        least, most: the range; the message says those that are given.
    """
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return
    described = f" of at least {least}" if least > -(2**63) else ""
    if most < 2**63 - 1:
        described = f" from {least} to {most}"
    raise MXError(f"{name}={value!r} must be an integer{described}")
