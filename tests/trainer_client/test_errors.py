from __future__ import annotations

from trainer_client.errors import AdapterError, FleetRefused, IncompleteAdapter, PublishError, ReplicaAnswer


def test_adapter_errors_name_the_key() -> None:
    error = IncompleteAdapter("adapter_config.json", "not there")
    assert (str(error), error.key, error.reason) == (
        "adapter_config.json: not there",
        "adapter_config.json",
        "not there",
    )
    assert isinstance(error, AdapterError) and isinstance(error, PublishError)


def test_a_refusal_lists_what_replicas_said_once() -> None:
    said = [ReplicaAnswer(0, 400, "rank 16"), ReplicaAnswer(1, None, "no answer")]
    assert str(FleetRefused(502, "not loaded", said)) == (
        "not loaded; replica 0: rank 16; replica 1: no answer (status 502)"
    )
    assert str(FleetRefused(502, "not loaded (replica 0: rank 16)", said[:1])) == (
        "not loaded (replica 0: rank 16) (status 502)"
    )
