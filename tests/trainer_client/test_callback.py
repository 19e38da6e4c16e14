from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from trainer_client.errors import AdapterError
from trainer_client.sources import Weights


@dataclass
class FakePublisher:
    adapter_name: str | None = None
    done: list[str] = field(default_factory=list)
    fails: bool = False

    def start_run(self) -> tuple[str, ...]:
        self.done.append("start_run")
        return ()

    def publish(self, weights: Weights) -> Any:
        if self.fails:
            raise AdapterError("x", "is broken")
        self.done.append(f"publish {weights.tensors['w']}")
        return types.SimpleNamespace(name=f"v{len(self.done)}")


@pytest.fixture
def callback_type(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """PublishCallback over a stand-in for transformers, whose own callback has nothing but empty hooks."""
    stand_in = types.ModuleType("transformers")
    stand_in.TrainerCallback = type("TrainerCallback", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    monkeypatch.delitem(sys.modules, "trainer_client.callback", raising=False)
    import trainer_client.callback as module

    gathered: list[Any] = []

    def gather(model: Any, adapter_name: str | None) -> Weights:
        gathered.append(model)
        return Weights({"w": model}, {})

    monkeypatch.setattr(module.sources, "gather", gather)
    module.PublishCallback.gathered = gathered
    yield module.PublishCallback
    sys.modules.pop("trainer_client.callback", None)


def train(callback: Any, steps: int, *, rank: int = 0, first: int = 0) -> None:
    state = types.SimpleNamespace(global_step=first, is_world_process_zero=rank == 0)
    callback.on_train_begin(None, state, None, model=state.global_step)
    for step in range(first + 1, first + steps + 1):
        state.global_step = step
        callback.on_step_end(None, state, None, model=step)
    callback.on_train_end(None, state, None, model=state.global_step)


def test_start_every_few_steps_and_the_end(callback_type: Any) -> None:
    publisher = FakePublisher()
    callback = callback_type(publisher, every_steps=2)
    train(callback, 5)
    assert publisher.done == ["start_run", "publish 0", "publish 2", "publish 4", "publish 5"]
    assert callback.last.name == "v5"


def test_a_last_step_that_was_published_is_not_published_again(callback_type: Any) -> None:
    publisher = FakePublisher()
    train(callback_type(publisher, every_steps=2, at_begin=False, sweep=False), 4)
    assert publisher.done == ["publish 2", "publish 4"]


def test_a_resumed_training_sweeps_nothing(callback_type: Any) -> None:
    publisher = FakePublisher()
    train(callback_type(publisher), 1, first=7)
    assert publisher.done == ["publish 7", "publish 8"]


def test_other_ranks_gather_and_publish_nothing(callback_type: Any) -> None:
    publisher = FakePublisher()
    train(callback_type(publisher), 2, rank=1)
    assert publisher.done == []
    assert callback_type.gathered == [0, 1, 2]


def test_a_failed_publish_ends_the_training_or_is_logged(callback_type: Any, caplog: pytest.LogCaptureFixture) -> None:
    publisher = FakePublisher(fails=True)
    with pytest.raises(AdapterError):
        train(callback_type(publisher), 1)
    train(callback_type(publisher, on_error="warn"), 1)
    assert "x: is broken" in caplog.text
    with pytest.raises(ValueError, match="every_steps"):
        callback_type(publisher, every_steps=0)
