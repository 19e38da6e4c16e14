"""One real vLLM on CPU as a replica for adapter-only reinforcement learning.

About 45 s from start to ready on two cores, and 3.2 GB. The whole test session shares two of them.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen

import httpx

from .realenv import free_port, kill_group, real_python, spawn, tail

MAX_LORAS = 6
MAX_LORA_RANK = 8
BLOCK = 16
START_SECS = 240


@dataclass
class Replica:
    """A `vllm serve` process that can be killed and started again on the same port.

    `directory` is its working directory and holds its log. A path below /proc/self/cwd is thus another directory for
    each replica: that is how a test makes a mount that only some of them see.
    `core` keeps it to one core, so that an idle replica does not lend its computing power to a busy one.
    """

    directory: Path
    model: Path
    token: str
    extra: Sequence[str] = ()
    core: int | None = None
    port: int = field(default_factory=free_port)
    events_port: int = field(default_factory=free_port)
    process: Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.directory / "vllm.log"

    def client(self, timeout: float = 60) -> httpx.Client:
        """Speaks to the replica itself, past the proxy."""
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {self.token}"}, timeout=timeout)

    def start(self) -> None:
        """Returns at once; `wait_ready` waits."""
        self.directory.mkdir(parents=True, exist_ok=True)
        env = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "LORAFLEET_"))}
        env |= {
            "VLLM_API_KEY": self.token,  # the same as --api-key, but not to be read in the process list
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",  # or a small function of the sampler is compiled, which needs a C++ compiler
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        options = {
            "--model": self.model,
            "--served-model-name": "base",
            "--host": "127.0.0.1",
            "--port": self.port,
            "--dtype": "float32",
            "--max-model-len": 2048,
            "--max-num-seqs": 64,
            "--block-size": BLOCK,
            "--max-loras": MAX_LORAS,
            "--max-cpu-loras": MAX_LORAS,
            "--max-lora-rank": MAX_LORA_RANK,
            "--generation-config": "vllm",
            # TRL compares these log-probabilities with its own of the tempered distribution.
            "--logprobs-mode": "processed_logprobs",
        }
        # `vllm serve` looks up a distribution called vllm, which this wheel is not; the module is the same server.
        pinned = [] if self.core is None else ["taskset", "--cpu-list", str(self.core)]
        command = [*pinned, str(real_python()), "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in options.items():
            command += [name, str(value)]
        command += ["--enable-lora", "--enforce-eager", "--enable-prompt-tokens-details", *self.extra]
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",  # with a concrete host the publisher would connect, not bind
            "topic": "kv",
        }
        command += ["--kv-events-config", json.dumps(events)]
        self.process = spawn(command, self.log, cwd=self.directory, env=env)

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def wait_ready(self) -> None:
        """Raises RuntimeError, with the end of the log, when it ends or is not healthy within START_SECS."""
        deadline = time.monotonic() + START_SECS
        with self.client(timeout=5) as client:
            while time.monotonic() < deadline:
                if not self.running():
                    raise RuntimeError(f"vLLM ended while starting:\n{tail(self.log)}")
                try:
                    if client.get("/health").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.25)
        raise RuntimeError(f"vLLM was not healthy after {START_SECS} s:\n{tail(self.log)}")

    def kill(self) -> None:
        """kill -9, engine process included; nothing is said to anybody."""
        if self.process is not None:
            kill_group(self.process)
            self.process = None

    def adapters(self) -> dict[str, str]:
        """Adapter name -> path, as /v1/models lists them."""
        with self.client() as client:
            models = client.get("/v1/models").raise_for_status().json()["data"]
        return {model["id"]: model["root"] for model in models if model.get("parent")}

    def counter(self, name: str) -> float:
        """The sum over labels of one of vLLM's own metrics, such as vllm:num_requests_running."""
        with self.client() as client:
            lines = client.get("/metrics").raise_for_status().text.splitlines()
        samples = [line for line in lines if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples)

    def reset(self) -> None:
        """As if newly started: nothing runs, no adapter is listed, no block is cached.

        The engine's adapter slots stay as they are, since an unload only forgets the name; it needs no care, for the
        least recently used one makes room.
        """
        with self.client() as client:
            client.post("/resume").raise_for_status()
            client.post("/abort_requests", json={}).raise_for_status()
            for name in self.adapters():
                client.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()
            deadline = time.monotonic() + 30
            while not client.post("/reset_prefix_cache").raise_for_status().json()["success"]:
                assert time.monotonic() < deadline, "requests still run after they were aborted"
                time.sleep(0.05)


def start_all(replicas: Sequence[Replica]) -> None:
    """Starts those that do not run, all at once, and waits for every one."""
    started = [replica for replica in replicas if not replica.running()]
    for replica in started:
        replica.start()
    for replica in started:
        replica.wait_ready()
