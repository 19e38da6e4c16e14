"""What a trainer needs of lorafleet: publish versioned adapters, and talk to the fleet's control plane.

The names below are imported when they are first used, so that `import trainer_client.digest` (which the proxy does too)
costs nothing but the standard library, and torch, peft and transformers are touched only by whoever hands them in.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer_client import errors

if TYPE_CHECKING:
    from trainer_client.callback import PublishCallback as PublishCallback
    from trainer_client.client import FleetClient
    from trainer_client.published import Published
    from trainer_client.publisher import AdapterPublisher
    from trainer_client.verify import AdapterFacts, verify_adapter

# Without PublishCallback, which needs transformers: `import *` must work where there is none.
__all__ = [
    "AdapterFacts",
    "AdapterPublisher",
    "FleetClient",
    "Published",
    "errors",
    "verify_adapter",
]

_HOME = {
    "AdapterFacts": "verify",
    "AdapterPublisher": "publisher",
    "FleetClient": "client",
    "PublishCallback": "callback",
    "Published": "published",
    "verify_adapter": "verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
