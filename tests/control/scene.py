"""A world for tests of one part of the control plane: quiet, and ended whatever happens."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tests.control.virtual_time import VirtualLoop, end
from tests.control.world import World

T = TypeVar("T")


@contextmanager
def quiet_loop() -> Iterator[VirtualLoop]:
    """Virtual time with the log off; all that runs in it is ended."""
    logging.disable(logging.CRITICAL)
    loop = VirtualLoop()
    try:
        yield loop
    finally:
        end(loop)
        logging.disable(logging.NOTSET)


@contextmanager
def world_of(replicas: int = 3, **more: Any) -> Iterator[World]:
    """Ready replicas behind a proxy."""
    with quiet_loop() as loop:
        world = World(loop, replicas=replicas, **more)
        world.seconds(3)
        assert len(world.proxy.fleet.ready()) == replicas
        yield world
        world.proxy.kill()


def do(world: World, call: Coroutine[Any, Any, T]) -> T:
    """Run it as the proxy does, to its end; raises what it raises."""
    result: T = world.loop.run_until_complete(world.proxy.spawn(call))
    return result
