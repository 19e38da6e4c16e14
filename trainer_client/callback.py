"""A transformers callback for trainers that do not publish by themselves (TRL's AsyncGRPOTrainer does).

Importing this file imports transformers; `from trainer_client import PublishCallback` is what does so.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

from transformers import TrainerCallback

from trainer_client import sources
from trainer_client.errors import TrainerClientError
from trainer_client.published import Published
from trainer_client.publisher import AdapterPublisher

_log = logging.getLogger("lorafleet.callback")


class PublishCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """Publishes the trained adapter at the start, every `every_steps` optimizer steps, and at the end.

    All ranks gather (a sharded weight is assembled by all of them), rank 0 publishes. At the start of training the
    publisher sweeps what an earlier run left, unless training resumes from a checkpoint or `sweep` is false.
    `on_error="warn"` logs a failed publish and trains on; the default ends the training, since rollouts would go on
    under an ever older policy. `last` is what was published last, on rank 0.
    """

    def __init__(
        self,
        publisher: AdapterPublisher,
        every_steps: int = 1,
        *,
        at_begin: bool = True,
        sweep: bool = True,
        on_error: Literal["raise", "warn"] = "raise",
    ) -> None:
        if every_steps < 1:
            raise ValueError(f"every_steps {every_steps} is below 1")
        self.publisher = publisher
        self.every_steps = every_steps
        self.last: Published | None = None
        self._at_begin = at_begin
        self._sweep = sweep
        self._on_error = on_error
        self._published_step: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sweep, and publish the weights that training starts from."""
        if self._sweep and state.is_world_process_zero and not state.global_step:
            self._tolerate(self.publisher.start_run)
        if self._at_begin:
            self._publish(state, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish when the step's turn has come."""
        if state.global_step % self.every_steps == 0:
            self._publish(state, kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the final weights, if the last step did not."""
        if self._published_step != state.global_step:
            self._publish(state, kwargs["model"])

    def _publish(self, state: Any, model: Any) -> None:
        weights = sources.gather(model, self.publisher.adapter_name)
        self._published_step = state.global_step
        if state.is_world_process_zero:
            self._tolerate(lambda: self._keep(self.publisher.publish(weights)))

    def _keep(self, published: Published) -> None:
        self.last = published

    def _tolerate(self, action: Any) -> None:
        try:
            action()
        except TrainerClientError as error:
            if self._on_error == "raise":
                raise
            _log.warning("not published, training goes on: %s", error)
