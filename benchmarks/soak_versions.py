"""Which weights a name may mean at a moment: what the soak holds every answer against."""

from __future__ import annotations

from pathlib import Path

from proxy.simulator.adapters import read_adapter
from trainer_client.digest import adapter_digest

NAME = "soak"
LATEST = f"{NAME}-latest"


class Versions:
    """The published versions of one policy. `committed` is the newest that somebody is known to have been served."""

    def __init__(self, root: Path) -> None:
        self.committed = 0
        self._root = root
        self._known: dict[int, tuple[str, str]] = {}

    def ask(self, back: int = 0) -> str:
        """The name of the newest version, or of one `back` versions before it."""
        return f"{NAME}-v{max(1, self.committed - back)}"

    def seen(self, version: int) -> None:
        """An answer or the publisher said that this version is committed."""
        self.committed = max(self.committed, version)

    def meaning(self, asked: str, answered: str, floor: int) -> int | str:
        """The version that an answer which calls itself `answered` came from, or what is wrong with that.

        `floor` is what was committed when the request was sent: `latest` never means an older one.
        """
        number = answered.removeprefix(f"{NAME}-v")
        if not number.isdigit():
            return f"{asked} was answered as {answered}"
        version = int(number)
        if asked == LATEST:
            return version if version >= floor else f"{LATEST} meant v{version} when v{floor} was committed"
        return version if asked == answered else f"{asked} was answered as {answered}"

    def remember(self, version: int) -> tuple[str, str]:
        """Its weights (as the simulator names them) and its digest; read from its files, which are there by now."""
        if version not in self._known:
            path = self._root / f"{NAME}-v{version}"
            self._known[version] = (read_adapter(str(path)).weights, adapter_digest(path))
        return self._known[version]
