"""Replicas' metrics pages, honest and not, become one valid page."""

from __future__ import annotations

import math
from collections import Counter as Tally

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from proxy.web import exposition
from proxy.web.exposition import MAX_LINE_CHARS, merge, parse

PAGE = b"""\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 13.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
# HELP vllm:ttft_seconds Time to first token.
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_bucket{engine="0",le="0.1"} 1.0
vllm:ttft_seconds_bucket{engine="0",le="+Inf"} 2.0
vllm:ttft_seconds_count{engine="0"} 2.0
vllm:ttft_seconds_sum{engine="0"} 0.5
"""


def test_two_replicas_become_one_page() -> None:
    assert merge([(0, PAGE), (12, PAGE)]).decode() == (
        "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{replica="0",engine="0",model_name="tiny"} 3.0\n'
        'vllm:num_requests_running{replica="12",engine="0",model_name="tiny"} 3.0\n'
        "# HELP vllm:ttft_seconds Time to first token.\n"
        "# TYPE vllm:ttft_seconds histogram\n"
        'vllm:ttft_seconds_bucket{replica="0",engine="0",le="0.1"} 1.0\n'
        'vllm:ttft_seconds_bucket{replica="0",engine="0",le="+Inf"} 2.0\n'
        'vllm:ttft_seconds_count{replica="0",engine="0"} 2.0\n'
        'vllm:ttft_seconds_sum{replica="0",engine="0"} 0.5\n'
        'vllm:ttft_seconds_bucket{replica="12",engine="0",le="0.1"} 1.0\n'
        'vllm:ttft_seconds_bucket{replica="12",engine="0",le="+Inf"} 2.0\n'
        'vllm:ttft_seconds_count{replica="12",engine="0"} 2.0\n'
        'vllm:ttft_seconds_sum{replica="12",engine="0"} 0.5\n'
    )


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("vllm:a 1", 'vllm:a{replica="7"} 1'),
        ("vllm:a{} 1", 'vllm:a{replica="7"} 1'),
        ("vllm:a{}1", 'vllm:a{replica="7"} 1'),
        ("vllm:a\t{ }\t1", 'vllm:a{replica="7"} 1'),
        ('vllm:a{b=""} 1', 'vllm:a{replica="7",b=""} 1'),
        ('vllm:a{b="c",} 1', 'vllm:a{replica="7",b="c"} 1'),
        ('vllm:a{ b = "c" , d="e" } 1', 'vllm:a{replica="7",b="c",d="e"} 1'),
        ("vllm:a NaN\r", 'vllm:a{replica="7"} NaN'),
        ("vllm:a -Inf", 'vllm:a{replica="7"} -Inf'),
        ("vllm:a 1.5e-07", 'vllm:a{replica="7"} 1.5e-07'),
        ("vllm:a 1 1700000000000", 'vllm:a{replica="7"} 1'),
        ('vllm:a{b="c"} 1 # {trace_id="x"} 0.67 1700000000.1', 'vllm:a{replica="7",b="c"} 1'),
        (r'vllm:a{b="q\"u\\o\nte}"} 1', r'vllm:a{replica="7",b="q\"u\\o\nte}"} 1'),
        ('vllm:a{b="ünï # {} 3"} 1', 'vllm:a{replica="7",b="ünï # {} 3"} 1'),
        ('vllm:a{replica="9"} 1', 'vllm:a{replica="7",exported_replica="9"} 1'),
        (
            'vllm:a{exported_replica="8",replica="9"} 1',
            'vllm:a{replica="7",exported_replica="8",exported_exported_replica="9"} 1',
        ),
    ],
)
def test_samples_that_are_kept(line: str, kept: str) -> None:
    assert merge([(7, line.encode())]).decode() == f"# TYPE vllm:a untyped\n{kept}\n"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "vllm:a",
        "vllm:a1",
        "vllm:a one",
        "vllm:a 1 2 3",
        "vllm:a 0x10",
        "vllm:a 1_000",
        'vllm:a{b="c} 1',
        'vllm:a{b="c"d="e"} 1',
        'vllm:a{,b="c"} 1',
        'vllm:a{b="c",,} 1',
        r'vllm:a{b="\t"} 1',
        'vllm:a{b="c",b="d"} 1',
        'vllm:a{"b"="c"} 1',
        'vllm:a{b-c="d"} 1',
        'vllm:a{b="\x00"} 1',
        'vllm:a{b="\x1b[31m"} 1',
        '{"vllm:a",b="c"} 1',
        "vllm-a 1",
        "vllm:a 1 \rvllm:b 2",
        "python_info 1",
        "# vllm:a 1",
        "<html>vllm:a</html>",
        f'vllm:a{{b="{"c" * MAX_LINE_CHARS}"}} 1',
    ],
)
def test_lines_that_are_dropped(line: str) -> None:
    good = b"\nvllm:z 1\n"
    assert merge([(0, line.encode() + good)]).decode() == '# TYPE vllm:z untyped\nvllm:z{replica="0"} 1\n'


@pytest.mark.timeout(20)
@pytest.mark.parametrize("unit", ['b="c",', " ", "1", "\t1", " #", "\\\\", 'b="" ', "{}", '"', "1.", "e1", "a"])
@pytest.mark.parametrize(
    "start", ["vllm:a", "vllm:a ", "vllm:a{", 'vllm:a{b="', "vllm:a 1", "vllm:a{} 1 #", "# HELP vllm:a"]
)
def test_no_line_takes_more_than_linear_time(start: str, unit: str) -> None:
    line = (start + unit * MAX_LINE_CHARS)[: MAX_LINE_CHARS - 1] + "!"
    check(merge([(0, line.encode())]), {0})


def test_a_family_comes_once_even_when_a_replica_scatters_it() -> None:
    scattered = b"# TYPE vllm:a gauge\nvllm:a 1\nvllm:b 2\n# TYPE vllm:a counter\n# HELP vllm:a late\n" + (
        b'vllm:a{c="d"} 3\nvllm:a 4\n'
    )
    assert merge([(0, scattered)]).decode() == (
        "# HELP vllm:a late\n# TYPE vllm:a gauge\n"
        'vllm:a{replica="0"} 1\nvllm:a{replica="0",c="d"} 3\n'
        '# TYPE vllm:b untyped\nvllm:b{replica="0"} 2\n'
    )


def test_where_replicas_disagree_the_first_word_holds() -> None:
    histogram = b'# TYPE vllm:a histogram\nvllm:a_bucket{le="+Inf"} 1\nvllm:a_bucket{le="x"} 1\nvllm:a_count 1\n'
    liar = b"# TYPE vllm:a gauge\n# TYPE vllm:a_bucket gauge\nvllm:a 5\nvllm:a_bucket 6\nvllm:a_sum 7\n"
    assert merge([(0, histogram), (1, liar)]).decode() == (
        "# TYPE vllm:a histogram\n"
        'vllm:a_bucket{replica="0",le="+Inf"} 1\nvllm:a_count{replica="0"} 1\nvllm:a_sum{replica="1"} 7\n'
    )


def test_a_summary_needs_its_quantiles() -> None:
    page = b'# TYPE vllm:s summary\nvllm:s{quantile="0.5"} 1\nvllm:s 2\nvllm:s{quantile="x"} 3\nvllm:s_sum 4\n'
    assert merge([(0, page)]).decode() == (
        '# TYPE vllm:s summary\nvllm:s{replica="0",quantile="0.5"} 1\nvllm:s_sum{replica="0"} 4\n'
    )


def test_help_text_is_made_valid() -> None:
    page = b"# HELP vllm:a a\\q \\n \\\\ end\\\nvllm:a 1"
    assert merge([(0, page)]).decode().splitlines()[0] == r"# HELP vllm:a a\\q \n \\ end\\"


def test_openmetrics_is_read_as_well() -> None:
    page = b"""\
# HELP vllm:tokens Tokens.
# TYPE vllm:tokens counter
vllm:tokens_total{engine="0"} 4.0 # {trace_id="x"} 1.0 1700000000.25
# TYPE vllm:config info
vllm:config_info{block_size="16"} 1.0
# EOF
"""
    assert merge([(0, page)]).decode() == (
        "# HELP vllm:tokens_total Tokens.\n# TYPE vllm:tokens_total counter\n"
        'vllm:tokens_total{replica="0",engine="0"} 4.0\n'
        '# TYPE vllm:config_info untyped\nvllm:config_info{replica="0",block_size="16"} 1.0\n'
    )


def test_hidden_text_takes_its_line_with_it() -> None:
    page = b'vllm:a{b="Bearer s3cret"} 1\n# HELP vllm:c at http://u:p@host\nvllm:c 2\nvllm:d{e="q\\"q"} 3\n'
    assert merge([(0, page)], hidden=["s3cret", "http://u:p@host", 'q"q', ""]).decode() == (
        '# TYPE vllm:c untyped\nvllm:c{replica="0"} 2\n'
    )


def test_size_and_count_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "MAX_PAGE_BYTES", 25)
    assert merge([(0, b"vllm:a 1\nvllm:b 2\nvllm:c 3333333333\n")]).count(b"replica") == 2
    monkeypatch.setattr(exposition, "MAX_SAMPLES", 1)
    assert len(parse(0, b"vllm:a 1\nvllm:b 2\n").samples) == 1
    assert merge([]) == merge([(0, b"")]) == b""


def check(merged: bytes, replicas: set[int]) -> None:
    """Whatever went in: the page parses, families come once and whole, and every sample says whose it is."""
    text = merged.decode()
    types = [line.split(" ")[2] for line in text.split("\n") if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("vllm:")
        for sample in family.samples:
            assert int(sample.labels["replica"]) in replicas


lines = st.lists(
    st.one_of(
        st.text(max_size=40),
        st.from_regex(r"vllm:[a-c](_bucket|_sum|_count|_total)?", fullmatch=True).flatmap(
            lambda name: st.sampled_from(
                [
                    f"# TYPE {name} {kind}"
                    for kind in ("counter", "gauge", "histogram", "summary", "untyped", "info", "x")
                ]
                + [f"# HELP {name} \\", f"{name} 1", f'{name}{{le="1"}} 2', f'{name}{{replica="0",quantile="1"}} 3']
            )
        ),
    ),
    max_size=12,
)


@given(st.lists(lines, min_size=1, max_size=3))
def test_any_text_gives_a_valid_page(pages: list[list[str]]) -> None:
    check(merge([(i, "\n".join(page).encode("utf-8", "replace")) for i, page in enumerate(pages)]), set(range(3)))


@given(st.binary(max_size=200))
def test_any_bytes_give_a_valid_page(raw: bytes) -> None:
    check(merge([(0, raw), (1, PAGE + raw)]), {0, 1})


values = st.floats(allow_nan=True, allow_infinity=True)
# The client library's parser splits on every kind of line end, the format only on "\n": keep to what both read alike.
label_text = st.text(st.characters(blacklist_categories=("Cs", "Cc", "Zl", "Zp")) | st.just("\n"), max_size=12)


@given(st.lists(st.tuples(label_text, values), max_size=8, unique_by=lambda pair: pair[0]))
def test_honest_pages_lose_nothing(samples: list[tuple[str, float]]) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("vllm:g", 'Help \\ with "odd" \n text.', ["label"], registry=registry)
    histogram = Histogram("vllm:h", "H.", registry=registry)
    for text, value in samples:
        gauge.labels(text).set(value)
        histogram.observe(0.0 if math.isnan(value) else value)
    page = generate_latest(registry)
    got = {f.name: f for f in text_string_to_metric_families(merge([(3, page)]).decode())}
    want = {f.name: f for f in text_string_to_metric_families(page.decode())}
    assert got.keys() == {name for name, family in want.items() if family.samples}
    for name, family in got.items():
        assert (family.type, family.documentation) == (want[name].type, want[name].documentation)
        assert Tally((s.name, frozenset(s.labels.items()), str(s.value)) for s in family.samples) == Tally(
            (s.name, frozenset({**s.labels, "replica": "3"}.items()), str(s.value)) for s in want[name].samples
        )
