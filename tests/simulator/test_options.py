from dataclasses import asdict

from proxy.simulator import ReplicaOptions


def test_the_engine_gets_what_it_needs() -> None:
    options = ReplicaOptions(block_size=8, decode_slowdown=0.8, base_weights="b", prefill_tps=5)
    config = asdict(options.engine_config())
    assert config.pop("prefix_caching")
    assert {name: getattr(options, name) for name in config} == config


def test_context_is_bounded_by_the_cache() -> None:
    assert ReplicaOptions(max_model_len=100).context == 100
    assert ReplicaOptions(max_model_len=100, capacity_blocks=2).context == 32
