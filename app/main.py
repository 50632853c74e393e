"""`build(args)`: the Serve application, for `serve run`, `serve deploy`, KubeRay and `llm-serve` alike."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ProxyLocation
from starlette.applications import Starlette

from app.draft import DraftHost, SocketChannel, build_draft
from app.ingress import build_asgi_app
from app.logs import configure_access_log, configure_log
from app.metrics import Metrics, RayExporter
from app.placement import Engines
from app.ranks import RankActors, bundles
from app.replica import EngineReplica, build_engine, load_tokenizer
from app.router import Router
from app.settings import ServingConfig, check_bind, check_otlp

logger = logging.getLogger(__name__)

ROUTERS_AT_MOST = 1024
EXPORT_SECONDS = 5.0


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application for options as in ServingConfig. Raises ConfigError, also when the proxy is open and keyless."""
    return build_app(ServingConfig.from_options(args))


def build_app(config: ServingConfig) -> serve.Application:
    """The same for a ServingConfig."""
    check_bind(_proxy_host() or config.host, config.api_key)
    check_otlp(config)
    # Serve kills what drains longer than this: a stream may take as long as its request may.
    common = {"graceful_shutdown_timeout_s": config.request_timeout, "graceful_shutdown_wait_loop_s": 0.2}
    draft = serve.deployment(
        _DraftModel,
        name="DraftModel",
        **_draft_scale(config),
        health_check_period_s=2,
        health_check_timeout_s=5,
        graceful_shutdown_timeout_s=1,  # its engines look for another one
        graceful_shutdown_wait_loop_s=0.2,
        ray_actor_options={"num_cpus": 0 if config.draft_num_gpus else 1, "num_gpus": config.draft_num_gpus},
    )
    gpus = 1 if wants_gpu(config) else 0
    engine = serve.deployment(
        _EngineReplica,
        name="EngineReplica",
        **_scale(config),
        # The engine bounds its queue itself. A pump counts as a request, one for each Router.
        max_ongoing_requests=config.max_batch_size + config.max_queued_requests + ROUTERS_AT_MOST,
        health_check_period_s=5,
        request_router_config={"request_router_class": "app.pinning:PinningRequestRouter"},
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
        **({"placement_group_bundles": bundles(config, gpus)} if config.tensor_parallel_size > 1 else {}),
        **common,
    )
    router = serve.deployment(
        serve.ingress()(_RouterIngress),
        name="Router",
        num_replicas=config.num_routers,
        max_ongoing_requests=1_000_000,  # the Router sheds load itself, with a Retry-After
        ray_actor_options={"num_cpus": 0},
        max_surge_percent=100,  # a new one answers before the old one goes
        **common,
    )
    drafts = draft.bind(config) if config.has_draft_actors else None
    return router.bind(config, engine.bind(config, drafts))


class _EngineReplica(EngineReplica):
    async def __init__(  # type: ignore[misc]
        self, config: ServingConfig, drafts: DeploymentHandle[Any] | None
    ) -> None:
        configure_log(sys.__stderr__)
        channel = SocketChannel() if drafts is not None else None
        self._ranks = RankActors(config) if config.tensor_parallel_size > 1 else None
        address = None if self._ranks is None else self._ranks.address
        engine, description = await asyncio.to_thread(build_engine, config, channel, address)
        super().__init__(engine, config, description, _replica_name(), channel)
        self._exporting = asyncio.create_task(_export(self.metrics))
        if drafts is not None:
            self._connecting = asyncio.create_task(self._keep_draft(drafts))

    async def describe_settled(self) -> dict[str, Any]:
        """`describe`, after a moment for a draft that is just coming up, which belongs to what runs here."""
        deadline = time.monotonic() + 5
        while self.draft is not None and self.draft.description is None and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        return await self.describe()

    def check_health(self) -> None:
        super().check_health()
        if self._ranks is not None:
            self._ranks.check()

    def _fail_calls(self, error: BaseException) -> None:
        if self._ranks is not None:
            os._exit(1)  # Serve replaces a process at once, one that says it is ill after three times
        super()._fail_calls(error)

    async def _keep_draft(self, drafts: DeploymentHandle[Any]) -> None:
        """Looks for a draft process whenever there is none, and keeps a call to it open while there is."""
        assert self.draft is not None
        method, call, shown = drafts.options(method_name="lend", stream=True), None, ""
        while True:
            if not self.draft.connected:
                if call is not None:
                    call.cancel()
                try:
                    call = method.remote()
                    address, key = await asyncio.wait_for(anext(call), 5)
                    sizes = self.engine.vocabulary.size, self.engine.hidden_size
                    await asyncio.to_thread(self.draft.connect, address, key, self.metrics.replica, *sizes)
                    shown = ""
                except Exception as error:
                    if str(error) != shown:
                        shown = str(error)
                        logger.warning("no draft, so plain decoding: %s", shown or type(error).__name__)
            await asyncio.sleep(0.5)

    def __del__(self) -> None:
        self.close()


class _DraftModel:
    """Serve's care for a draft process: its place, its health, its restart. Engines talk to it over a socket."""

    async def __init__(self, config: ServingConfig) -> None:  # type: ignore[misc]
        configure_log(sys.__stderr__)
        resources = ray.get_runtime_context().get_assigned_resources()
        threads, gpus = max(1, int(resources.get("CPU", 1))), resources.get("GPU", 0)
        host = ray.util.get_node_ip_address()
        self._host: DraftHost = await asyncio.to_thread(build_draft, config, host, threads, gpus)

    async def lend(self) -> AsyncIterator[tuple[tuple[str, int], bytes]]:
        """Where an engine connects, and the key that lets it in. Open as long as the engine is there: Serve counts."""
        yield self._host.address, self._host.key
        await asyncio.Event().wait()

    def check_health(self) -> None:
        self._host.check_health()

    def __del__(self) -> None:
        self._host.close()


class _RouterIngress(Router):
    async def __init__(self, config: ServingConfig, engines: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        # Now Serve runs for certain, where `build` may have come before it.
        host = await asyncio.to_thread(_proxy_host)
        check_bind(host or config.host, config.api_key)
        tokenizer = await asyncio.to_thread(load_tokenizer, config)
        routers = serve.get_deployment_handle("Router", serve.get_replica_context().app_name)
        super().__init__(config, Engines(engines, routers), tokenizer, _replica_name())
        configure_log(sys.__stderr__)
        configure_access_log(sys.__stderr__)
        self._exporting = asyncio.create_task(_export(self.metrics))
        await self.settled()  # the Routers of another model serve on, with its replicas

    def __serve_build_asgi_app__(self) -> Starlette:
        if (endpoint := self.config.otlp_traces_endpoint) is None:
            return build_asgi_app(self)
        from app.tracing import make_tracer

        return build_asgi_app(self, make_tracer(endpoint, _replica_name()))


def _scale(config: ServingConfig) -> dict[str, Any]:
    """How many engine replicas, in Serve's words."""
    if config.max_replicas is None:
        return {"num_replicas": config.num_replicas}
    policy = {"policy": {"policy_function": "app.autoscaling:policy"}}
    return _between(config, config.num_replicas, config.max_replicas, policy)


def _draft_scale(config: ServingConfig) -> dict[str, Any]:
    """How many drafts: with more engines proportionally more. An engine is a call that stays open."""
    if config.max_replicas is None:
        return {"num_replicas": config.num_drafts, "max_ongoing_requests": 1024}
    share = config.engines_per_draft
    scale = _between(config, config.num_drafts, config.max_drafts, {"target_ongoing_requests": share})
    return {**scale, "max_ongoing_requests": share}


def _between(config: ServingConfig, least: int, most: int, how: dict[str, Any]) -> dict[str, Any]:
    scaling = {
        "min_replicas": least,
        "max_replicas": most,
        "upscale_delay_s": config.upscale_delay,
        "downscale_delay_s": config.downscale_delay,
        "look_back_period_s": 15.0,
        **how,
    }
    return {"num_replicas": "auto", "autoscaling_config": scaling}


def _replica_name() -> str:
    replica = serve.get_replica_context()
    return f"{replica.deployment}:{replica.replica_id.unique_id}"


async def _export(metrics: Metrics) -> None:
    """Gives this process's series to Ray's own metrics, from which its dashboard draws."""
    exporter = RayExporter(metrics)
    while True:
        await asyncio.sleep(EXPORT_SECONDS)
        exporter.push()


def _proxy_host() -> str | None:
    """The address Serve's proxies listen on, where Serve runs already; None where it doesn't, or has no proxies."""
    if not ray.is_initialized():
        return None
    try:
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return None
    options = ray.get(controller.get_http_config.remote())
    if options.location == ProxyLocation.Disabled:
        return None
    return options.host or "0.0.0.0"


def wants_gpu(config: ServingConfig) -> bool:
    if config.device == "auto":
        if ray.is_initialized():
            gpus = ray.cluster_resources().get("GPU", 0)
        else:  # `serve run` starts it here, after this
            import torch

            gpus = torch.cuda.device_count()
        return bool(gpus >= config.num_replicas * config.tensor_parallel_size)
    return config.device.startswith("cuda")
