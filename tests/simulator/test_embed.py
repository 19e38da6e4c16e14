import asyncio

import httpx
import pytest

from proxy.simulator import SimFleet


async def test_a_fleet_has_its_own_ports_and_options(http: httpx.AsyncClient) -> None:
    async with SimFleet(each=[{}, {"speed": 0.5}], max_loras=3) as fleet:
        assert len(set(fleet.urls)) == 2
        assert [replica.options.speed for replica in fleet.replicas] == [1.0, 0.5]
        assert all(replica.options.max_loras == 3 for replica in fleet.replicas)
        for url in fleet.urls:
            assert (await http.get(f"{url}/health")).status_code == 200
        assert fleet.replicas[0].calls["health"] == 1
    for url in fleet.urls:
        with pytest.raises(httpx.TransportError):
            await http.get(f"{url}/health")


async def test_stop_start_restart_keep_the_address() -> None:
    async with SimFleet(2) as fleet:
        urls = fleet.urls
        fleet.stop(0)
        async with httpx.AsyncClient() as fresh:
            with pytest.raises(httpx.ConnectError):
                await fresh.get(f"{urls[0]}/health")
            assert (await fresh.get(f"{urls[1]}/health")).status_code == 200
            await fleet.start(0)
            await fleet.restart(1, down_secs=0.01)
        async with httpx.AsyncClient() as fresh:
            for url in urls:
                assert (await fresh.get(f"{url}/health")).status_code == 200
        assert fleet.urls == urls
        assert [replica.state()["boots"] for replica in fleet.replicas] == [2, 2]


async def test_cut_and_refuse_keep_the_state() -> None:
    async with SimFleet(1) as fleet, httpx.AsyncClient(base_url=fleet.urls[0]) as client:
        replica = fleet.replicas[0]
        await client.post("/pause", params={"mode": "keep"})
        replica.cut()
        with pytest.raises(httpx.TransportError):
            await client.get("/is_paused")
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        replica.refuse()
        assert not replica.up
        await replica.start()
        assert replica.state()["boots"] == 1 and replica.state()["paused"]
        assert replica.weights("nobody") is None


async def test_closing_ends_what_is_running() -> None:
    async with SimFleet(1, decode_tps=1) as fleet, httpx.AsyncClient(base_url=fleet.urls[0]) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": [1] * 20, "max_tokens": 100}))
        while not fleet.replicas[0].replica.engine.running:
            await asyncio.sleep(0.001)
        fleet.replicas[0].close()
        with pytest.raises(httpx.TransportError):
            await asking
