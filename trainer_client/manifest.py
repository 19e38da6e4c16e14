"""`lorafleet.json`: the marker, written last, that says which bytes make this version complete.

    {"format": 1, "name": "trl-policy-v7", "version": 7, "digest": "sha256:...",
     "files": {"adapter_config.json": {"size": 711, "sha256": "..."}, ...}}

On a local disk the rename of the directory makes a version appear at once. On an object-store mount a directory rename
is a copy, file by file and in any order, and a reader may see the marker before the data: so a directory that disagrees
with its manifest is "not ready yet", never "broken". A directory without one (TRL writes none) is judged by its files.

Standard library only; the proxy reads manifests too.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_client.digest import PIECE, FileFacts
from trainer_client.errors import AdapterError, IncompleteAdapter

MANIFEST_FILE = "lorafleet.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a publisher says about one version directory."""

    name: str
    version: int
    digest: str
    files: dict[str, FileFacts]

    def to_bytes(self) -> bytes:
        """The JSON text, with stable key order."""
        files = {name: {"size": facts.size, "sha256": facts.sha256} for name, facts in sorted(self.files.items())}
        body = {"format": FORMAT, "name": self.name, "version": self.version, "digest": self.digest, "files": files}
        return (json.dumps(body, indent=1) + "\n").encode()


def parse_manifest(text: bytes) -> Manifest:
    """Raises IncompleteAdapter for text that is cut short, AdapterError for a format this version does not know."""
    try:
        body: Any = json.loads(text)
    except ValueError:
        raise IncompleteAdapter(MANIFEST_FILE, "is not complete JSON (yet)") from None
    try:
        if body["format"] != FORMAT:
            raise AdapterError(MANIFEST_FILE, f"format {body['format']!r} is not known here (only {FORMAT})")
        files = {str(k): FileFacts(int(v["size"]), str(v["sha256"])) for k, v in body["files"].items()}
        return Manifest(str(body["name"]), int(body["version"]), str(body["digest"]), files)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise AdapterError(MANIFEST_FILE, f"lacks or misstates {error}") from None


def read_manifest(directory: str | os.PathLike[str]) -> Manifest | None:
    """The directory's manifest, or None where a trainer that is not ours wrote it."""
    try:
        text = (Path(directory) / MANIFEST_FILE).read_bytes()
    except FileNotFoundError:
        return None
    return parse_manifest(text)


def check_manifest(directory: str | os.PathLike[str], manifest: Manifest, *, contents: bool = False) -> None:
    """Compare sizes, and with `contents` the SHA-256 of every byte. Raises IncompleteAdapter on any difference."""
    for name, facts in manifest.files.items():
        path = Path(directory) / name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise IncompleteAdapter(name, "named in the manifest and not there (yet)") from None
        if size != facts.size:
            raise IncompleteAdapter(name, f"{size} bytes of {facts.size} that the manifest names")
        if contents and _sha256(path) != facts.sha256:
            raise IncompleteAdapter(name, "its bytes are not (yet) those that the manifest names")


def _sha256(path: Path) -> str:
    own = hashlib.sha256()
    with open(path, "rb", buffering=0) as handle:
        while piece := handle.read(PIECE):
            own.update(piece)
    return own.hexdigest()
