"""Names and numbers of versions: `<name>-v<N>`, N from 1, and which directories of a root are such versions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

# What the fleet takes as a name, less "/" (one directory level), with room for "-v" and a number within 128.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,99}")


def check_name(name: str) -> str:
    """Raises ValueError unless `name` can be both a directory's name and a model name at the fleet."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"name {name!r}: use 1 to 100 of A-Z a-z 0-9 . _ : - and start with a letter, digit or _")
    return name


def version_name(name: str, version: int) -> str:
    """`trl-policy`, 7 -> `trl-policy-v7`."""
    return f"{name}-v{version}"


def parse_version(name: str, text: str) -> int | None:
    """The number in `<name>-v<N>`, None for anything else (`-v0`, `-v07` and other names included)."""
    match = re.fullmatch(rf"{re.escape(name)}-v([1-9][0-9]{{0,17}})", text)
    return int(match[1]) if match else None


def versions_among(name: str, names: Iterable[str]) -> frozenset[int]:
    """The numbers of all names that are versions of `name`."""
    return frozenset(n for n in (parse_version(name, text) for text in names) if n is not None)


def versions_on_disk(root: str, name: str) -> frozenset[int]:
    """Numbers of the version directories in `root`, complete or not: whatever has the name has taken the number."""
    return versions_among(name, os.listdir(root))


def next_version(*taken: Iterable[int]) -> int:
    """One above everything that was ever seen; gaps are never filled."""
    return max((n for numbers in taken for n in numbers), default=0) + 1
