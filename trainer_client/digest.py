"""The digest that stands for an adapter's weights. Standard library only; the proxy computes the same from the files.

The rule, in full: one SHA-256 over the files that define the weights, in this order, each as
`name + b"\\0" + size in decimal ASCII + b"\\0"` followed by its bytes:

1. `adapter_config.json` (rank and scaling are part of what is served),
2. the first that exists of `adapter_model.safetensors`, `adapter_model.bin`, `adapter_model.pt` - the one file vLLM
   0.27 reads, it looks for them in this order.

Written as `sha256:<64 hex digits>`. A README, a tokenizer or our own manifest beside them do not count.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from trainer_client.errors import IncompleteAdapter

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Size in bytes and SHA-256 (hex) of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class AdapterScan:
    """The adapter's digest, and the facts of each file that went into it, from one pass over the bytes."""

    digest: str
    files: dict[str, FileFacts]


def weight_file(directory: str | os.PathLike[str]) -> str:
    """Name of the file that vLLM would read the tensors from.

    Raises IncompleteAdapter when there is none (yet).
    """
    for name in WEIGHT_FILES:
        if os.path.isfile(os.path.join(directory, name)):
            return name
    raise IncompleteAdapter(WEIGHT_FILES[0], f"not in {os.fspath(directory)}")


def scan_adapter(directory: str | os.PathLike[str]) -> AdapterScan:
    """Read the files that define the weights once, in pieces of 1 MiB.

    Raises IncompleteAdapter when a file is missing or changes its size while it is read, OSError as the disk says.
    """
    whole = hashlib.sha256()
    files: dict[str, FileFacts] = {}
    for name in (CONFIG_FILE, weight_file(directory)):
        own = hashlib.sha256()
        try:
            handle = open(Path(directory) / name, "rb", buffering=0)  # noqa: SIM115 - closed by the with below
        except FileNotFoundError:
            raise IncompleteAdapter(name, f"not in {os.fspath(directory)}") from None
        with handle:
            size = os.fstat(handle.fileno()).st_size
            whole.update(b"%s\0%d\0" % (name.encode(), size))
            read = 0
            while piece := handle.read(PIECE):
                read += len(piece)
                own.update(piece)
                whole.update(piece)
        if read != size:
            raise IncompleteAdapter(name, f"had {size} bytes when opened and {read} when read: it is being written")
        files[name] = FileFacts(size, own.hexdigest())
    return AdapterScan(f"sha256:{whole.hexdigest()}", files)


def adapter_digest(directory: str | os.PathLike[str]) -> str:
    """`sha256:<hex>` of the adapter in `directory`, by the rule at the top of this file."""
    return scan_adapter(directory).digest
