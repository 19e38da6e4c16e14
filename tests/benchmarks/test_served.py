import os
from pathlib import Path

import pytest

from benchmarks.served import serving
from proxy.simulator.process import SimProcess


def test_a_proxy_for_a_while(tmp_path: Path) -> None:
    with SimProcess(api_key="t", require_token_everywhere=True) as replica:
        with serving([replica.url], tmp_path, "t") as served:
            assert served.rss() > 10 << 20
            assert served.descriptors() > 3
            assert served.cpu_secs() > 0
            assert any(served.url in text for text in served.lines())
        with pytest.raises(ProcessLookupError):
            os.kill(served.pid, 0)


def test_the_log_says_why_it_did_not_start(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="--pause"),
        serving(["http://127.0.0.1:9"], tmp_path, "t", "--pause", "maybe"),
    ):
        pass
