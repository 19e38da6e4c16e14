import pytest

from benchmarks import soak
from benchmarks.soak_report import failed


def test_a_soak_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "GROUPS", 2)
    monkeypatch.setattr(soak, "PUBLISH_SECS", 0.5)
    monkeypatch.setattr(soak, "RESTART_SECS", 1.5)
    monkeypatch.setattr(soak, "DOWN_SECS", 0.2)
    monkeypatch.setitem(soak.REPLICA, "decode_tps", 400.0)
    report = soak.measure(minutes=0.05, replicas=2)
    # A kill that hits the replica on which a load is tried first fails that publish, as it should.
    report["publishes failed"] = [why for why in report["publishes failed"] if "died on it" not in why]
    assert failed(report) == []
    assert report["completions answered"] > 0
    assert report["publishes"] > 0
