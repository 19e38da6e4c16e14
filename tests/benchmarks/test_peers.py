import os
import sys
from pathlib import Path

import pytest

from benchmarks.peers import Peer, lorafleet, running, sglang_router
from proxy.simulator.embed import SimFleet


def test_commands_name_the_policy_and_every_replica() -> None:
    urls = ["http://a:1", "http://b:2"]
    for peer, policy in ((lorafleet("round_robin"), "round_robin"), (sglang_router(Path("/x/python")), "cache_aware")):
        command = peer.command(urls, 4000, Path("/scratch"))
        assert command[command.index("--policy") + 1] == policy
        assert command[command.index("--port") + 1] == "4000"
        assert set(urls) <= set(command)


async def test_it_takes_requests_when_it_is_said_to_run() -> None:
    async with SimFleet(2) as fleet, running(lorafleet("prefix"), fleet.urls) as router:
        assert router.address.startswith("http://127.0.0.1:") and router.pid > 0
    with pytest.raises(ProcessLookupError):
        os.kill(router.pid, 0)


async def test_the_end_of_the_output_says_why_it_did_not_start() -> None:
    broken = Peer("broken", lambda urls, port, scratch: [sys.executable, "-c", "raise SystemExit('no such flag')"])
    with pytest.raises(RuntimeError, match="no such flag"):
        async with running(broken, ["http://127.0.0.1:1"]):
            pass
