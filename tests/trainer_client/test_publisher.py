from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer_client.fake_fleet import FakeFleet, error_body
from tests.trainer_client.support import CONFIG, a_name, temporaries, tensors, visible, write_adapter
from trainer_client import AdapterPublisher, FleetClient
from trainer_client.digest import adapter_digest
from trainer_client.errors import AdapterError, FleetRefused, FleetUnreachable, PublishError, RootBusy


@pytest.fixture
def client(fleet: FakeFleet) -> Any:
    with FleetClient(fleet.url) as running:
        yield running


def spoiled() -> dict[str, Any]:
    return tensors() | {a_name("q_proj", "B"): np.full((6, 4), np.nan, "f4")}


def test_a_publish_from_tensors_is_on_disk_and_in_the_fleet(root: Path, fleet: FakeFleet, client: FleetClient) -> None:
    with AdapterPublisher(root, client=client) as publisher:
        done = publisher.publish(tensors(), CONFIG)
    assert (done.version, done.name, done.path) == (1, "trl-policy-v1", str(root / "trl-policy-v1"))
    assert done.digest == adapter_digest(done.path)
    assert (done.rank, done.loaded, done.unloaded, done.deleted, done.warnings) == (4, True, (), (), ())
    assert fleet.asked("/v1/load_lora_adapter") == [
        {"lora_name": "trl-policy-v1", "lora_path": done.path, "load_inplace": False, "digest": done.digest}
    ]
    assert visible(root) == ["trl-policy-v1"] and temporaries(root) == []


def test_replicas_may_run_as_another_user(root: Path) -> None:
    old = os.umask(0o022)
    try:
        done = AdapterPublisher(root).publish(tensors(), CONFIG)
    finally:
        os.umask(old)
    assert os.stat(done.path).st_mode & 0o777 == 0o755
    assert {p.stat().st_mode & 0o777 for p in Path(done.path).iterdir()} == {0o644}


def test_the_window_over_a_run(root: Path, fleet: FakeFleet, client: FleetClient) -> None:
    publisher = AdapterPublisher(root, client=client, max_staleness=1)
    steps = []
    for seed in range(5):
        done = publisher.publish(tensors(seed), CONFIG)
        steps.append((done.version, done.unloaded, done.deleted, sorted(fleet.adapters), visible(root)))
    v = "trl-policy-v{}".format
    assert steps == [
        (1, (), (), [v(1)], [v(1)]),
        (2, (), (), [v(1), v(2)], [v(1), v(2)]),
        (3, (v(1),), (), [v(2), v(3)], [v(1), v(2), v(3)]),
        (4, (v(2),), (v(1),), [v(3), v(4)], [v(2), v(3), v(4)]),
        (5, (v(3),), (v(2),), [v(4), v(5)], [v(3), v(4), v(5)]),
    ]


def test_a_load_comes_before_the_unload(root: Path, fleet: FakeFleet, client: FleetClient) -> None:
    publisher = AdapterPublisher(root, "p", client=client, max_staleness=0)
    for seed in range(2):
        publisher.publish(tensors(seed), CONFIG)
    assert fleet.changes() == [("load", "p-v1"), ("load", "p-v2"), ("unload", "p-v1")]


def test_keep_holds_more_files(root: Path) -> None:
    publisher = AdapterPublisher(root, "p", keep=5, max_staleness=0)
    for seed in range(7):
        publisher.publish(tensors(seed), CONFIG)
    assert publisher.versions() == (3, 4, 5, 6, 7)


def test_numbering_goes_on_from_disk_and_fleet(root: Path, fleet: FakeFleet, client: FleetClient) -> None:
    write_adapter(root / "p-v3")
    assert AdapterPublisher(root, "p").publish(tensors(), CONFIG).version == 4
    fleet.adapters["p-v9"] = {"name": "p-v9", "path": "/elsewhere/p-v9"}
    fleet.adapters["q-v30"] = {"name": "q-v30", "path": "/elsewhere/q-v30"}
    assert AdapterPublisher(root, "p", client=client).publish(tensors(), CONFIG).version == 10


def test_numbers_do_not_come_back_when_the_files_are_gone(root: Path) -> None:
    publisher = AdapterPublisher(root, "p")
    publisher.publish(tensors(), CONFIG)
    publisher.publish(tensors(1), CONFIG)
    publisher.start_run()
    assert visible(root) == []
    assert AdapterPublisher(root, "p").publish(tensors(2), CONFIG).version == 3


def test_a_broken_adapter_changes_nothing(root: Path, fleet: FakeFleet, client: FleetClient) -> None:
    publisher = AdapterPublisher(root, client=client)
    publisher.publish(tensors(), CONFIG)
    before, loads = sorted(os.listdir(root)), fleet.changes()
    for source, config in (
        (spoiled(), CONFIG),
        (tensors(), CONFIG | {"r": 8}),
        (tensors(), CONFIG | {"use_dora": True}),
    ):
        with pytest.raises(AdapterError):
            publisher.publish(source, config)
    assert (sorted(os.listdir(root)), fleet.changes()) == (before, loads)
    assert publisher.publish(tensors(1), CONFIG).version == 2


def test_the_servers_limits_are_asked_once(root: Path, fleet: FakeFleet, client: FleetClient) -> None:
    fleet.max_lora_rank = 2
    publisher = AdapterPublisher(root, client=client)
    for _ in range(2):
        with pytest.raises(AdapterError, match="--max-lora-rank is 2"):
            publisher.publish(tensors(), CONFIG)
    assert len(fleet.asked("/server_info")) == 1
    assert visible(root) == []


def test_a_window_that_does_not_fit_is_refused_with_the_numbers(
    root: Path, fleet: FakeFleet, client: FleetClient
) -> None:
    fleet.max_loras = 3
    with pytest.raises(PublishError, match=r"--max-loras is 3, but max_staleness 2 needs 4"):
        AdapterPublisher(root, client=client).publish(tensors(), CONFIG)
    assert fleet.changes() == [] and visible(root) == []
    AdapterPublisher(root, client=client, max_staleness=1).publish(tensors(), CONFIG)


def test_a_refused_load_is_taken_back_and_its_number_stays_taken(
    root: Path, fleet: FakeFleet, client: FleetClient
) -> None:
    publisher = AdapterPublisher(root, "p", client=client)
    publisher.publish(tensors(), CONFIG)
    replicas = [{"replica": 1, "status": 500, "message": "out of memory"}]
    fleet.before = lambda path, body: (
        (502, error_body(502, "not loaded", replicas=replicas)) if path == "/v1/load_lora_adapter" else None
    )
    with pytest.raises(FleetRefused, match="replica 1: out of memory"):
        publisher.publish(tensors(1), CONFIG)
    assert visible(root) == ["p-v1"] and temporaries(root) == []
    assert sorted(fleet.adapters) == ["p-v1"]
    fleet.before = lambda path, body: None
    assert AdapterPublisher(root, "p", client=client).publish(tensors(2), CONFIG).version == 3


def test_a_load_without_an_answer_keeps_the_files(root: Path, fleet: FakeFleet, client: FleetClient) -> None:
    publisher = AdapterPublisher(root, "p", client=client, max_staleness=0)
    fleet.before = lambda path, body: "lost" if path == "/v1/load_lora_adapter" else None
    with pytest.raises(FleetUnreachable):
        publisher.publish(tensors(), CONFIG)
    assert visible(root) == ["p-v1"]
    assert sorted(fleet.adapters) == ["p-v1"]
    fleet.before = lambda path, body: None
    done = publisher.publish(tensors(1), CONFIG)
    assert (done.version, done.unloaded) == (2, ("p-v1",))


def test_a_fleet_that_is_away_leaves_the_disk_alone(root: Path, fleet: FakeFleet, client: FleetClient) -> None:
    publisher = AdapterPublisher(root, "p", client=client)
    fleet.before = lambda path, body: "reset"
    with pytest.raises(FleetUnreachable):
        publisher.publish(tensors(), CONFIG)
    assert visible(root) == [] and temporaries(root) == []


def test_an_unload_that_fails_is_a_warning_and_tried_again(root: Path, fleet: FakeFleet, client: FleetClient) -> None:
    publisher = AdapterPublisher(root, "p", client=client, max_staleness=0)
    publisher.publish(tensors(), CONFIG)
    fleet.before = lambda path, body: (409, error_body(409, "busy")) if path == "/v1/unload_lora_adapter" else None
    done = publisher.publish(tensors(1), CONFIG)
    assert done.loaded and done.unloaded == () and "p-v1 was not unloaded: busy" in done.warnings[0]
    fleet.before = lambda path, body: None
    done = publisher.publish(tensors(2), CONFIG)
    assert done.unloaded == ("p-v1", "p-v2") and visible(root) == ["p-v1", "p-v2", "p-v3"]


def test_another_mount_point_on_the_replicas(root: Path, fleet: FakeFleet, client: FleetClient) -> None:
    AdapterPublisher(root, "p", client=client, replica_root="/mnt/shared").publish(tensors(), CONFIG)
    assert fleet.asked("/v1/load_lora_adapter")[0]["lora_path"] == "/mnt/shared/p-v1"


def test_a_relative_root_is_sent_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fleet: FakeFleet, client: FleetClient
) -> None:
    monkeypatch.chdir(tmp_path)
    AdapterPublisher("out", "p", url=fleet.url).publish(tensors(), CONFIG)
    assert fleet.asked("/v1/load_lora_adapter")[0]["lora_path"] == str(tmp_path / "out" / "p-v1")


def test_the_start_of_a_run_unloads_and_removes_what_was_left(
    root: Path, fleet: FakeFleet, client: FleetClient
) -> None:
    first = AdapterPublisher(root, "p", client=client)
    for seed in range(3):
        first.publish(tensors(seed), CONFIG)
    write_adapter(root / "p-v7")  # on disk only
    fleet.adapters["p-v9"] = {"name": "p-v9", "path": "/another/run/p-v9"}
    fleet.adapters["q-v1"] = {"name": "q-v1", "path": "/another/policy"}
    write_adapter(root / "other")

    second = AdapterPublisher(root, "p", client=client)
    assert second.start_run() == ("p-v1", "p-v2", "p-v3", "p-v9")
    assert sorted(fleet.adapters) == ["q-v1"]
    # unloaded just now: an engine may still be reading them, so they go one publish later
    assert visible(root) == ["other", "p-v1", "p-v2", "p-v3"]
    done = second.publish(tensors(9), CONFIG)
    assert (done.version, done.deleted) == (10, ("p-v1", "p-v2", "p-v3"))
    assert visible(root) == ["other", "p-v10"]
    with pytest.raises(PublishError, match="taken over"):
        first.publish(tensors(), CONFIG)


def test_what_drains_after_a_sweep_keeps_its_files_until_it_has_drained(
    root: Path, fleet: FakeFleet, client: FleetClient
) -> None:
    AdapterPublisher(root, "p", client=client).publish(tensors(), CONFIG)
    publisher = AdapterPublisher(root, "p", client=client)
    publisher.start_run()
    fleet.adapters["p-v1"] = {"name": "p-v1", "state": "retiring"}
    assert publisher.publish(tensors(1), CONFIG).deleted == ()
    del fleet.adapters["p-v1"]
    assert publisher.publish(tensors(2), CONFIG).deleted == ("p-v1",)


def test_a_sweep_keeps_off_a_root_that_another_process_uses(root: Path, fleet: FakeFleet, client: FleetClient) -> None:
    from trainer_client.rootlock import LiveMark

    publisher = AdapterPublisher(root, "p", client=client)
    publisher.publish(tensors(), CONFIG)
    foreign = LiveMark(str(root), "p")
    foreign.show()
    with pytest.raises(RootBusy, match="nothing was swept"):
        publisher.start_run()
    assert visible(root) == ["p-v1"] and sorted(fleet.adapters) == ["p-v1"]
    foreign.hide()
    assert publisher.start_run() == ("p-v1",)


def test_a_sweep_that_cannot_unload_removes_no_files(root: Path, fleet: FakeFleet, client: FleetClient) -> None:
    publisher = AdapterPublisher(root, "p", client=client)
    publisher.publish(tensors(), CONFIG)
    fleet.before = lambda path, body: (500, error_body(500, "no")) if path == "/v1/unload_lora_adapter" else None
    with pytest.raises(FleetRefused):
        publisher.start_run()
    assert visible(root) == ["p-v1"]


def test_publishers_side_by_side_never_share_a_number(root: Path) -> None:
    found: list[tuple[int, str]] = []

    def run(seed: int) -> None:
        with AdapterPublisher(root, "p", keep=100) as publisher:
            for step in range(4):
                done = publisher.publish(tensors(seed * 10 + step), CONFIG)
                found.append((done.version, done.digest))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(version for version, _ in found) == list(range(1, 17))
    assert all(adapter_digest(root / f"p-v{version}") == digest for version, digest in found)


def test_temporaries_of_the_dead_are_swept_at_the_start(root: Path) -> None:
    from tests.trainer_client.test_disk import dead_pid
    from trainer_client import disk

    root.mkdir()
    stale = root / f".p.{disk._host()}.{dead_pid()}.7.0000000a.tmp"
    stale.mkdir()
    (root / ".p-v3.tmp").mkdir()  # TRL's own
    AdapterPublisher(root, "p")
    assert temporaries(root) == [".p-v3.tmp"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "a/b"},
        {"keep": 0},
        {"max_staleness": -1},
        {"replica_root": "relative"},
        {"url": "http://h", "client": object()},
        {"url": "no-scheme"},
    ],
)
def test_values_that_make_no_sense(root: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        AdapterPublisher(root, **wrong)
    assert not root.exists()


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(PublishError, match="preparing"):
        AdapterPublisher(tmp_path / "f")
