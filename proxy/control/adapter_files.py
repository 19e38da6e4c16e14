"""What the proxy itself can see of an adapter's files: where they are, whether they may be loaded, their digest."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proxy.errors import BadRequest
from trainer_client.digest import CONFIG_FILE, WEIGHT_FILES, adapter_digest, weight_file
from trainer_client.errors import AdapterError, IncompleteAdapter
from trainer_client.manifest import read_manifest
from trainer_client.safetensors_file import read_header

NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")

Fingerprint = tuple[tuple[str, int, int, int], ...]
"""(file name, size in bytes, mtime in ns, inode) of the files that define the weights."""


@dataclass(frozen=True, slots=True)
class Seen:
    digest: str
    fingerprint: Fingerprint


def check_name(name: object, base_models: Sequence[str]) -> str:
    """A usable adapter name. Raises BadRequest that says what is wrong."""
    if not isinstance(name, str) or not name:
        raise BadRequest("lora_name must be a non-empty string", param="lora_name")
    if not NAME.fullmatch(name):
        raise BadRequest(
            "lora_name may have letters, digits and . _ : / - only, at most 128 of them", param="lora_name"
        )
    if name in base_models:
        raise BadRequest(f"lora_name {name!r} is the base model's name; choose another", param="lora_name")
    return name


def check_path(path: object, roots: Sequence[Path]) -> str:
    """An absolute adapter path, below one of `roots` when there are any, links resolved. Raises BadRequest.

    A relative path or a Hub name would mean something else on each replica, and vLLM would try to download it.
    """
    if not isinstance(path, str) or not path:
        raise BadRequest("lora_path must be a non-empty string", param="lora_path")
    if "\0" in path or len(path) > 4096 or not _encodable(path):
        raise BadRequest("lora_path is not a path", param="lora_path")
    if not path.startswith("/"):
        raise BadRequest(
            f"lora_path {path!r} is not absolute; replicas need a directory on a file system that they all see, "
            "a Hub name or a relative path is not accepted",
            param="lora_path",
        )
    if roots:
        real = Path(os.path.realpath(path))
        if not any(
            real.is_relative_to(os.path.realpath(root)) and real != Path(os.path.realpath(root)) for root in roots
        ):
            raise BadRequest(f"lora_path {path!r} is not below an --adapter-root", param="lora_path")
    return path


def _encodable(path: str) -> bool:
    try:
        os.fsencode(path)
    except ValueError:
        return False
    return True


def look(path: str) -> Seen | None:
    """Digest and fingerprint of the adapter at `path`; None when the proxy cannot see a whole adapter there.

    Reads every byte: call it from a thread. None also when the files changed while they were read, are shorter than
    they say, or are not (yet) what the publisher's manifest beside them names.
    """
    before = fingerprint(path)
    if before is None:
        return None
    try:
        _check_whole(Path(path))
        digest = adapter_digest(Path(path))
        manifest = read_manifest(path)
    except (OSError, ValueError, RecursionError, IncompleteAdapter):  # ValueError: no path at all
        return None
    except AdapterError:  # of a format that only a newer publisher knows
        manifest = None
    if manifest is not None and manifest.digest != digest:
        return None
    return Seen(digest, before) if fingerprint(path) == before else None


def _check_whole(directory: Path) -> None:
    """Raises IncompleteAdapter or OSError for files that end too early. What is broken for good is whole."""
    try:
        json.loads((directory / CONFIG_FILE).read_bytes())
    except ValueError:
        raise IncompleteAdapter(CONFIG_FILE, "is not complete JSON (yet)") from None
    name = weight_file(directory)
    if name == WEIGHT_FILES[0]:
        try:
            read_header(directory / name)
        except IncompleteAdapter:
            raise
        except AdapterError:
            pass


def fingerprint(path: str) -> Fingerprint | None:
    """What changes when a file of the adapter is replaced or rewritten; None when none of them is to be seen."""
    lines = []
    for name in (CONFIG_FILE, *WEIGHT_FILES):
        try:
            stat = os.stat(os.path.join(path, name))
        except (OSError, ValueError):
            continue
        lines.append((name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return tuple(lines) or None
