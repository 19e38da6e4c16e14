"""The fleet's own answers: /health, /v1/models, /server_info, /fleet, /metrics and their like."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import proxy
from proxy.control.answers import Answer
from proxy.control.facts import Facts
from proxy.control.membership import Membership
from proxy.control.plane import Plane
from proxy.control.switches import Switches
from proxy.errors import BadRequest, NotFound, Phase, Unavailable, UpstreamError
from proxy.fleet import Fleet
from proxy.metrics import Metrics
from proxy.upstream.vllm import VllmCalls
from proxy.web import exposition
from proxy.web.control import Endpoint, json_object
from proxy.web.fleet_view import Settings as ViewSettings
from proxy.web.fleet_view import fleet_view, is_healthy
from proxy.web.history import History

SCRAPE_SECS = 2.0
"""How long one replica's /metrics may take before the page goes out without it."""


class FleetApi:
    """Starlette endpoints; `routes` maps (method, path) to each."""

    def __init__(
        self,
        fleet: Fleet,
        plane: Plane,
        switches: Switches,
        membership: Membership,
        calls: VllmCalls,
        metrics: Metrics,
        history: History,
        view: ViewSettings,
    ) -> None:
        self._fleet = fleet
        self._plane = plane
        self._switches = switches
        self._membership = membership
        self._calls = calls
        self._metrics = metrics
        self._history = history
        self._view = view
        self._started = fleet.clock()
        self._created = int(time.time())
        self.routes: dict[tuple[str, str], Endpoint] = {
            ("GET", "/health"): self.health,
            ("GET", "/ping"): self.ping,
            ("POST", "/ping"): self.ping,
            ("GET", "/v1/models"): self.models,
            ("GET", "/server_info"): self.server_info,
            ("GET", "/version"): self.version,
            ("GET", "/is_paused"): self.is_paused,
            ("GET", "/is_sleeping"): self.is_sleeping,
            ("GET", "/metrics"): self.metrics,
            ("GET", "/fleet"): self.fleet,
            ("GET", "/fleet/replicas"): self.replicas,
            ("POST", "/fleet/replicas"): self.add_replica,
        }

    def endpoint(self, method: str, path: str) -> Endpoint | None:
        found = self.routes.get((method, path))
        if found is None and path.startswith("/fleet/replicas/"):
            if method == "POST" and path.endswith(("/drain", "/undrain")):
                return self.drain
            if method == "DELETE":
                return self.remove_replica
        return found

    # -- what a vLLM server would say ----------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """Never waits for a replica: TRL polls with a timeout of 5 s."""
        ready, total = len(self._fleet.ready()), len(self._fleet.members())
        healthy = self._healthy()
        body = {
            "status": "ok" if healthy else "starting" if not self._fleet.ready_once else "not ready",
            "ready": ready,
            "total": total,
            "min_ready": self._view.min_ready,
            "ready_once": len(self._fleet.ready_once),
        }
        return JSONResponse(body, status_code=200 if healthy else 503)

    async def ping(self, request: Request) -> Response:
        return Response(status_code=200 if self._healthy() else 503)

    async def models(self, request: Request) -> Response:
        """The base model first: TRL reads max_model_len of data[0]."""
        facts = self._facts()
        bases = [self._card(name, facts.base_root, None, self._max_model_len()) for name in facts.base_models]
        adapters = self._fleet.desired.adapters.values()
        cards = [self._card(a.name, a.path, facts.base_models[0], None) for a in adapters]
        return JSONResponse({"object": "list", "data": bases + cards})

    async def server_info(self, request: Request) -> Response:
        """One replica's tree with the fleet's limits in it: the smallest max_loras and rank, no data parallelism."""
        query = request.url.query
        answer = None
        for index in self._fleet.routable():
            endpoint = self._fleet.replicas[index].endpoint
            answer = await self._calls.server_info(endpoint, query, self._plane.settings.health_timeout_secs)
            if answer.ok:
                break
        if answer is None:
            raise Unavailable("no replica is ready")
        if not answer.ok:
            raise _refusal(answer)
        if parse_qs(query).get("config_format", ["text"])[-1] != "json":
            return Response(answer.body, media_type="application/json")
        try:
            tree = msgspec.json.decode(answer.body, type=dict[str, Any])
        except msgspec.DecodeError:
            raise UpstreamError("a replica's /server_info is not JSON", Phase.MAYBE_SENT) from None
        _as_one(tree.get("vllm_config"), [r.facts for r in self._fleet.members() if r.facts is not None])
        return Response(msgspec.json.encode(tree), media_type="application/json")

    async def version(self, request: Request) -> Response:
        versions = sorted({r.facts.version for r in self._fleet.members() if r.facts and r.facts.version})
        if not versions:
            raise Unavailable("no replica is ready")
        return JSONResponse({"version": versions[0], "versions": versions, "lorafleet": proxy.__version__})

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": self._switches.is_paused()})

    async def is_sleeping(self, request: Request) -> Response:
        return JSONResponse({"is_sleeping": self._fleet.desired.asleep is not None})

    # -- the operator's views ------------------------------------------------------------------------------------------

    async def metrics(self, request: Request) -> Response:
        """Ours, then every replica's vllm:* under its label; one that does not answer is left out."""
        members = self._fleet.members()
        answers = await asyncio.gather(*(self._calls.metrics(r.endpoint, SCRAPE_SECS) for r in members))
        pages = [(r.index, answer.body) for r, answer in zip(members, answers, strict=True) if answer.ok]
        hidden = [token for r in members if (token := r.endpoint.token())]
        merged = await asyncio.to_thread(exposition.merge, pages, hidden=hidden)
        return Response(self._metrics.render() + merged, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def fleet(self, request: Request) -> Response:
        rows = self._history.rows(_number(request.query_params.get("after", ""), default=-1))
        view = fleet_view(
            self._fleet,
            self._view,
            self._metrics.reading(),
            transactions=list(reversed(self._plane.records)),
            history=rows,
            started=self._started,
            wall=time.time(),
        )
        return Response(msgspec.json.encode(view), media_type="application/json")

    async def replicas(self, request: Request) -> Response:
        rows = [{"index": r.index, "url": r.endpoint.base, "state": r.state.value} for r in self._fleet.members()]
        return JSONResponse({"replicas": rows})

    async def add_replica(self, request: Request) -> Response:
        body = await json_object(request)
        index = await self._membership.add(body.get("url"))
        return JSONResponse({"index": index, "state": "joining"}, status_code=201)

    async def drain(self, request: Request) -> Response:
        index, verb = self._target(request, "drain", "undrain")
        change = self._membership.drain if verb == "drain" else self._membership.undrain
        state = await change(index)
        return JSONResponse({"index": index, "state": state, "in_flight": self._fleet.replicas[index].in_flight})

    async def remove_replica(self, request: Request) -> Response:
        index, _ = self._target(request, "")
        await self._membership.remove(index)
        return JSONResponse({"index": index, "state": "removed"})

    # -- inside --------------------------------------------------------------------------------------------------------

    def _target(self, request: Request, *verbs: str) -> tuple[int, str]:
        """The replica that a path is about, and what is to be done with it. Raises BadRequest, NotFound."""
        said, _, verb = request.url.path.removeprefix("/fleet/replicas/").partition("/")
        index = _number(said, default=-1)
        if index < 0:
            raise BadRequest("name the replica by its index, as /fleet shows it")
        if index not in {r.index for r in self._fleet.members()}:
            raise NotFound(f"there is no replica {index}")
        if verb not in verbs:
            raise NotFound(f"lorafleet knows no /fleet/replicas/{index}/{verb[:40]}")
        return index, verb

    def _healthy(self) -> bool:
        return is_healthy(self._fleet, self._view.min_ready, follows=self._view.follows)

    def _facts(self) -> Facts:
        for replica in self._fleet.ready() or self._fleet.members():
            if replica.facts is not None and replica.facts.base_models:
                return replica.facts
        raise Unavailable("no replica has said yet which model it serves")

    def _max_model_len(self) -> int | None:
        lengths = [r.facts.max_model_len for r in self._fleet.members() if r.facts and r.facts.max_model_len]
        return min(lengths, default=None)

    def _card(self, name: str, root: str | None, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": max_model_len,
            "permission": [],
        }


def _refusal(answer: Answer) -> UpstreamError:
    """A replica's no as our own error: its status and its words, not its body, which may say too much."""
    error = UpstreamError(answer.message, Phase.MAYBE_SENT)
    error.status = answer.status or error.status
    return error


def _number(text: str, *, default: int) -> int:
    """A small whole number as people write one; `default` for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else default


def _as_one(config: object, facts: list[Facts]) -> None:
    """Write the fleet's limits into one replica's vllm_config, in place."""
    if not isinstance(config, dict):
        return
    lora, parallel = config.get("lora_config"), config.get("parallel_config")
    if isinstance(lora, dict):
        for key, values in (
            ("max_loras", [f.max_loras for f in facts if f.max_loras is not None]),
            ("max_lora_rank", [f.max_lora_rank for f in facts if f.max_lora_rank is not None]),
        ):
            if values:
                lora[key] = min(values)
    if isinstance(parallel, dict):
        parallel["data_parallel_size"] = 1
