"""A faithful stand-in for a vLLM 0.27.1 API server, without a model: for tests, the demo and benchmarks.

``embed``     replicas inside the running event loop (``SimFleet``)
``process``   one replica as a process (``SimProcess``, ``python -m proxy.simulator``)
``engine``    the engine alone, on a virtual clock, for offline simulations
``weights``   which tokens come out (``expected_tokens``), so that a test knows whose weights answered
``adapters``  tiny adapter directories
``faults``    what can go wrong, on demand
"""

from proxy.simulator.adapters import read_adapter, write_adapter
from proxy.simulator.embed import SimFleet, SimReplica
from proxy.simulator.engine import Engine, EngineConfig
from proxy.simulator.faults import Fault, Faults
from proxy.simulator.options import ReplicaOptions
from proxy.simulator.process import SimProcess
from proxy.simulator.sequence import EngineRequest, Sequence
from proxy.simulator.slots import LoraRef
from proxy.simulator.weights import BASE, expected_logprobs, expected_tokens, mixed_weights

__all__ = [
    "BASE",
    "Engine",
    "EngineConfig",
    "EngineRequest",
    "Fault",
    "Faults",
    "LoraRef",
    "ReplicaOptions",
    "Sequence",
    "SimFleet",
    "SimProcess",
    "SimReplica",
    "expected_logprobs",
    "expected_tokens",
    "mixed_weights",
    "read_adapter",
    "write_adapter",
]
