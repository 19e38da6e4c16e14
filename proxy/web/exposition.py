"""Many replicas' /metrics pages made into one: every `vllm:*` sample, with a `replica` label that says whose it is.

The input is what replicas say and may be anything: a proxy's error page, half a line, another format, a lie meant to
break the scrape of all others. What is not a valid sample of the text format (0.0.4) is dropped, nothing else is.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/. Timestamps and exemplars are dropped: the merged
page is a scrape of now, and a replica whose clock is wrong must not write into the future.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

PREFIX = "vllm:"
MAX_PAGE_BYTES = 4 << 20
MAX_SAMPLES = 50_000
MAX_LINE_CHARS = 16_384
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[ \t]*+[a-zA-Z_][a-zA-Z0-9_]*+[ \t]*+=[ \t]*+"(?:[^"\\]|\\[\\"n])*+"[ \t]*+'
_FLOAT = r"[+-]?(?:(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?|[iI][nN][fF]|[nN][aA][nN])"
# Possessive throughout: no line, however odd, takes more than linear time.
_SAMPLE = re.compile(
    rf"({_NAME})[ \t]*+(?:\{{((?:{_LABEL}(?:,{_LABEL})*+,?)?+)[ \t]*+\}})?+[ \t]*+(?<=[ \t}}])({_FLOAT})"
    r"(?:[ \t]++-?[0-9.]++)?+(?:[ \t]++#.*)?+[ \t]*+"
)
_PAIR = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*("(?:[^"\\]|\\[\\"n])*")')
_COMMENT = re.compile(rf"#[ \t]+(HELP|TYPE)[ \t]+({_NAME})(?:[ \t]+(.*))?")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_BAD_ESCAPE = re.compile(r"\\(\\|n|)")

# How the types of OpenMetrics are called in the text format.
_TYPES = {
    "counter": "counter",
    "gauge": "gauge",
    "histogram": "histogram",
    "summary": "summary",
    "untyped": "untyped",
    "unknown": "untyped",
    "info": "gauge",
    "stateset": "gauge",
}
_SUFFIXES = {"_bucket": ("histogram",), "_sum": ("histogram", "summary"), "_count": ("histogram", "summary")}


@dataclass(slots=True)
class Page:
    """What is worth keeping of one replica's page: declarations, and samples as (name, finished line)."""

    types: dict[str, str] = field(default_factory=dict)
    helps: dict[str, str] = field(default_factory=dict)
    samples: list[tuple[str, str]] = field(default_factory=list)


def parse(replica: int, raw: bytes, *, hidden: Sequence[str] = ()) -> Page:
    """Read one replica's page. Never raises; looks at MAX_PAGE_BYTES and MAX_SAMPLES at most.

    Lines that contain one of `hidden` (tokens, URLs) are dropped whole.
    """
    page = Page()
    if len(raw) > MAX_PAGE_BYTES:
        raw = raw[: raw.rfind(b"\n", 0, MAX_PAGE_BYTES) + 1]
    text = raw.decode("utf-8", "replace")
    secrets = [s for value in hidden if value for s in {value, _escape(value)} if s in text]
    label = f'replica="{replica}"'
    seen: set[tuple[str, ...]] = set()
    for line in text.split("\n"):
        line = line.strip(" \t\r")
        if PREFIX not in line or len(line) > MAX_LINE_CHARS or _CONTROL.search(line):
            continue
        if secrets and any(secret in line for secret in secrets):
            continue
        if line[0] == "#":
            _declare(page, line)
        elif line.startswith(PREFIX) and len(page.samples) < MAX_SAMPLES:
            _sample(page, line, label, seen)
    return page


def render(pages: Iterable[Page]) -> bytes:
    """One page of the text format: each family once, its samples together, in the order first met.

    Where replicas disagree on a family's type or help, the first page's word holds, and samples that cannot belong to
    that type are dropped.
    """
    pages = list(pages)
    types: dict[str, str] = {}
    helps: dict[str, str] = {}
    for page in reversed(pages):
        types.update(page.types)
        helps.update(page.helps)
    families: dict[str, list[str]] = {}
    belongs: dict[str, str | None] = {}
    for page in pages:
        for name, line in page.samples:
            if name not in belongs:
                belongs[name] = _family(name, types)
            family = belongs[name]
            if family is not None and _fits(name, family, line, types):
                families.setdefault(family, []).append(line)
    out: list[str] = []
    for family, lines in families.items():
        declared = _declared_as(family, types)
        if declared in helps:
            out.append(f"# HELP {family} {helps[declared]}")
        out.append(f"# TYPE {family} {types.get(declared, 'untyped')}")
        out += lines
    return ("\n".join(out) + "\n").encode() if out else b""


def merge(pages: Iterable[tuple[int, bytes]], *, hidden: Sequence[str] = ()) -> bytes:
    """`parse` and `render` in one call, for (replica index, page) pairs."""
    return render([parse(replica, raw, hidden=hidden) for replica, raw in pages])


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _declare(page: Page, line: str) -> None:
    match = _COMMENT.fullmatch(line)
    if match is None or not match[2].startswith(PREFIX):
        return
    what, name, rest = match[1], match[2], match[3] or ""
    if what == "HELP":
        page.helps.setdefault(name, _BAD_ESCAPE.sub(lambda m: m[0] if m[1] else r"\\", rest))
    elif rest.strip() in _TYPES:
        page.types.setdefault(name, _TYPES[rest.strip()])


def _sample(page: Page, line: str, label: str, seen: set[tuple[str, ...]]) -> None:
    match = _SAMPLE.fullmatch(line)
    if match is None:
        return
    name, labels, value = match[1], match[2], match[3]
    pairs = _PAIR.findall(labels) if labels else []
    names = {pair[0] for pair in pairs}
    if len(names) != len(pairs):
        return
    key = (name, *sorted(f"{key}={text}" for key, text in pairs if text != '""'))
    if key in seen:
        return
    seen.add(key)
    if "replica" in names:
        new = "exported_replica"
        while new in names:
            new = "exported_" + new
        pairs = [(new if key == "replica" else key, text) for key, text in pairs]
    given = "".join(f",{key}={text}" for key, text in pairs)
    page.samples.append((name, f"{name}{{{label}{given}}} {value}"))


def _family(name: str, types: dict[str, str]) -> str | None:
    """The family that a sample's name belongs to; None when its type allows no such sample."""
    for suffix, kinds in _SUFFIXES.items():
        base = name.removesuffix(suffix)
        if base != name and types.get(base) in kinds:
            return base
    return None if types.get(name) == "histogram" else name


def _declared_as(family: str, types: dict[str, str]) -> str:
    """The name that the family's HELP and TYPE lines use: OpenMetrics declares a counter without its `_total`."""
    base = family.removesuffix("_total")
    return base if family not in types and types.get(base) == "counter" else family


def _fits(name: str, family: str, line: str, types: dict[str, str]) -> bool:
    kind = types.get(family)
    if kind == "histogram" and name.endswith("_bucket"):
        return _has_number(line, "le")
    if kind == "summary" and name == family:
        return _has_number(line, "quantile")
    return True


def _has_number(line: str, label: str) -> bool:
    return re.search(rf'[,{{]{label}="{_FLOAT}"[,}}]', line) is not None
