import httpx
import pytest

from proxy.simulator import ReplicaOptions, SimProcess
from proxy.simulator.process import parser


def test_flags_are_the_options() -> None:
    arguments = vars(
        parser().parse_args(["--max-loras", "3", "--no-dev-mode", "--decode-tps", "inf", "--api-key", "k"])
    )
    assert (arguments.pop("host"), arguments.pop("port")) == ("127.0.0.1", 0)
    assert ReplicaOptions(**arguments) == ReplicaOptions(max_loras=3, dev_mode=False, api_key="k")


def test_a_process_dies_hard_and_comes_back_on_its_port() -> None:
    with SimProcess(max_loras=3, model_name="m") as first:
        assert httpx.get(f"{first.url}/v1/models").json()["data"][0]["id"] == "m"
        httpx.post(f"{first.url}/pause")
        second = first.restarted()
    with second:
        assert (second.port, second.pid != first.pid) == (first.port, True)
        assert httpx.get(f"{second.url}/is_paused").json() == {"is_paused": False}


def test_faults_that_end_a_process() -> None:
    with SimProcess() as process:
        httpx.post(f"{process.url}/_sim/faults", json={"kind": "reset", "route": "models", "times": 1})
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{process.url}/v1/models")
        assert httpx.get(f"{process.url}/v1/models").status_code == 200
        httpx.post(f"{process.url}/_sim/faults", json={"kind": "crash", "route": "pause"})
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{process.url}/pause")
        assert process.wait(10) == 1


def test_what_does_not_start_says_so() -> None:
    with SimProcess() as process, pytest.raises(RuntimeError, match="did not start"):
        SimProcess(process.port)
