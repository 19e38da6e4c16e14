import pytest

from benchmarks.grpo_load import Run, lines


def run(peer: str, seconds: float, reused: int, shares: tuple[int, int] = (5, 5)) -> Run:
    return Run(peer, 8, seconds, reused, asked=1000, endless=800, shares=shares)


def test_the_table_has_medians_and_compares_with_round_robin() -> None:
    robin, prefix = "lorafleet round_robin", "lorafleet prefix"
    runs = [run(robin, 4.0, 400), run(prefix, 2.0, 800), run(prefix, 3.0, 760), run(prefix, 9.0, 800, (8, 2))]
    assert lines(runs)[1:] == [
        ["8", prefix, "0.800", "1.000", "1.00", "3.0 s (2.0 to 9.0)", "0.75"],
        ["8", robin, "0.400", "0.500", "1.00", "4.0 s (4.0 to 4.0)", "1.00"],
    ]


def test_balance_is_the_larger_share_over_the_mean() -> None:
    assert run("x", 1.0, 1, (9, 3)).balance == pytest.approx(1.5)
