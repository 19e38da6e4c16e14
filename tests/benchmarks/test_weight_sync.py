import random

from benchmarks.weight_sync import HEADINGS, Cell, lags


def test_lags_go_from_half_to_all() -> None:
    assert sorted(lags(3.0, 3, random.Random(1))) == [2.0, 2.5, 3.0]
    assert lags(0.5, 1, random.Random(1)) == [0.5]
    assert lags(1.0, 8, random.Random(1)) == lags(1.0, 8, random.Random(1)) != lags(1.0, 8, random.Random(2))


def test_a_row() -> None:
    cell = Cell("lazy", 8, 0.5, quiet=100.0)
    cell.routable += [0.6, 0.9, 0.7]
    cell.sync += [0.7, 1.0, 0.8]
    cell.tokens += [70, 90, 60]
    cell.lost += [-3.0, 10.0, -4.0]
    assert cell.rate == 88.0
    assert dict(zip(HEADINGS, cell.line(), strict=True)) == {
        "mounts lag": "0.5 s",
        "replicas": "8",
        "pause": "lazy",
        "to routable, median": "0.700 s",
        "longest": "0.900 s",
        "median beyond the lag": "0.200 s",
        "whole sync": "0.800 s",
        "tokens meanwhile": "70",
        "of the quiet rate": "88 %",
        "lost": "0",
    }


def test_a_sync_of_milliseconds_has_no_rate() -> None:
    cell = Cell("none", 2, 0.0, quiet=100.0)
    cell.sync += [0.01, 0.02]
    cell.tokens += [2, 3]
    assert cell.share() == ""
