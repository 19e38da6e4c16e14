from benchmarks.weight_sync_report import HEADINGS, Cell, panels


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


def test_the_picture_has_a_group_for_each_lag_and_fleet() -> None:
    quick, slow = Cell("lazy", 2, 0.5), Cell("eager", 2, 0.5)
    quick.routable, quick.lost = [0.5], [-2.0]
    slow.routable, slow.lost = [0.7], [60.0]
    times, lost = panels([quick, slow])
    assert times.groups == {"0.5 s, 2": {"lazy": 0.5, "eager": 0.7}}
    assert lost.groups == {"0.5 s, 2": {"lazy": 0.0, "eager": 30.0}}
    assert (times.top, lost.top) == (0.8, 40.0)
