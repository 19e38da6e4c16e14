"""kill -9 at each step of a publish, in a process of its own: what is left, and how the next publisher goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer_client.fake_fleet import FakeFleet
from tests.trainer_client.support import CONFIG, temporaries, tensors, visible, write_adapter
from trainer_client import AdapterPublisher, FleetClient
from trainer_client.failpoint import STEPS, VARIABLE, reach
from trainer_client.manifest import check_manifest, read_manifest
from trainer_client.verify import verify_adapter

BEFORE_THE_RENAME = ("temporary", "config", "weights", "verified", "manifest", "reserved")
CODE = """
import sys
from trainer_client import AdapterPublisher
AdapterPublisher(sys.argv[1], "p", url=sys.argv[2], max_staleness=0).publish(sys.argv[3])
"""


def test_nothing_happens_at_another_step(monkeypatch: pytest.MonkeyPatch) -> None:
    reach("config")
    monkeypatch.setenv(VARIABLE, "weights")
    reach("config")


@pytest.mark.parametrize("step", STEPS)
def test_killed_at(step: str, tmp_path: Path, root: Path, fleet: FakeFleet) -> None:
    with FleetClient(fleet.url) as client:
        first = AdapterPublisher(root, "p", client=client, max_staleness=0)
        for seed in range(2):
            first.publish(tensors(seed), CONFIG)
        first.close()
        source = write_adapter(tmp_path / "source", seed=7)
        done = subprocess.run(
            [sys.executable, "-c", CODE, str(root), fleet.url, str(source)],
            env=os.environ | {VARIABLE: step},
            capture_output=True,
            text=True,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr

        early = step in BEFORE_THE_RENAME
        assert ("p-v3" in visible(root)) is not early
        assert "p-v2" in visible(root)
        assert len(temporaries(root)) == (1 if early or step == "retired" else 0)
        for name in visible(root):
            manifest = read_manifest(root / name)
            assert manifest is not None
            check_manifest(root / name, manifest, contents=True)
            verify_adapter(root / name)
        # The last version that was loaded still is, and its files are there.
        newest = max(fleet.adapters)
        assert newest == ("p-v2" if early or step == "renamed" else "p-v3") and newest in visible(root)

        after = AdapterPublisher(root, "p", client=client, max_staleness=0)
        assert temporaries(root) == []
        published = after.publish(tensors(9), CONFIG)
        assert published.version == (3 if early and step != "reserved" else 4)
        assert sorted(fleet.adapters) == [published.name]
        after.publish(tensors(10), CONFIG)
        assert len(visible(root)) == 2
