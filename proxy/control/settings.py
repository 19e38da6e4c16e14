"""The settings that the control plane obeys; `proxy.config` fills them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Durations in seconds, wall or loop time alike.

    `lazy_pause`: a keep-pause is answered and remembered, the replicas go on. `strict`: a replica that is down fails a
    transaction. `unload_drain_secs`: how long completions under an unloaded name may run on before the replicas are
    told. `lost_files_secs`: how long an adapter that no replica holds is looked for before it is given up.
    """

    lazy_pause: bool = False
    pause_lease_secs: float = 600.0
    load_deadline_secs: float = 300.0
    adapter_roots: tuple[Path, ...] = ()
    strict: bool = False
    verify_load: bool = False
    unload_drain_secs: float = 120.0
    probe_secs: float = 1.0
    health_timeout_secs: float = 5.0
    admin_timeout_secs: float = 30.0
    lost_files_secs: float = 10.0
