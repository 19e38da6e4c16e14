from __future__ import annotations

import subprocess
import sys

import pytest

import trainer_client


def test_names_are_there() -> None:
    for name in trainer_client.__all__:
        assert getattr(trainer_client, name) is not None
    assert set(trainer_client.__all__) <= set(dir(trainer_client))
    with pytest.raises(AttributeError, match="nothing"):
        trainer_client.nothing  # noqa: B018


def test_importing_costs_nothing() -> None:
    code = (
        "import sys, trainer_client, trainer_client.digest, trainer_client.manifest, trainer_client.publisher;"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'httpx', 'numpy', 'torch', 'transformers', 'peft'}))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
