"""What is known of vLLM versions. Pure."""

from __future__ import annotations

FIRST_SAFE_LOADS = (0, 27)
"""vLLM 0.22.1 could answer a request with another adapter when one was loaded while it decoded (vLLM #47724); 0.27.1
compares the slot layout and does not. Versions between were not looked at."""

KNOWN_BAD_LOADS = (0, 22)


def numbers(version: str | None) -> tuple[int, ...] | None:
    """(0, 27, 1) of "0.27.1.post2"; None for what is no version."""
    parts: list[int] = []
    for part in (version or "").split(".")[:3]:
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts) or None


def loads_are_safe(version: str | None) -> bool:
    """Whether an adapter may be loaded while others decode; a version that is not known is believed."""
    found = numbers(version)
    return found is None or found >= FIRST_SAFE_LOADS
