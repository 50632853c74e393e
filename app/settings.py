"""The one place where an option has a name, a default and a check.

Options come from explicit arguments (flags of `llm-serve`, `args` of a Serve config), then from environment variables
`LLM_SERVING_<OPTION>`, then from the defaults here.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import ipaddress
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

ENV_PREFIX = "LLM_SERVING_"
DUMMY_MODEL = "dummy"


class ConfigError(ValueError):
    """An option that can't be used; the message is one line and names it."""


class ServingConfig(BaseSettings):
    """Everything an operator can set. Unknown names are refused, with the nearest known one in the message."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, protected_namespaces=(), env_ignore_empty=True
    )

    model: str = Field(description="folder, .gguf file or hub id; 'dummy' is a tiny random model for trials")
    tokenizer: str | None = Field(None, description="folder or hub id, when it isn't beside the model")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    served_model_name: str | None = Field(None, description="name clients use; default: the model's last path part")
    model_aliases: list[str] = Field(default_factory=list, description="further names clients may use")

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["int8", "int4"] | None = Field(
        None, description="weights of the layers on a CPU, rounded at the start: faster for a few requests at a time"
    )
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda)(:\d+)?$", description="auto, cpu or cuda")
    attn_impl: str = Field(
        "auto", description="attention backend: a registered name, package.module:factory, or auto: triton on CUDA"
    )
    mlp_impl: str = Field("mlp", description="MLP: a registered name, or package.module:factory")
    model_class: str | None = Field(None, description="package.module:Class of your own model, an engine.CausalLM")
    generation_backend: Literal["batched", "eager"] = Field("batched", description="eager: one request at a time")

    max_model_len: int | None = Field(None, ge=1, description="context in tokens; default: the model's")
    max_batch_size: int = Field(16, ge=1, le=4096, description="sequences in a step")
    max_batched_tokens: int = Field(2048, ge=1, description="tokens in a step: decodes and prompt chunks together")
    max_queued_requests: int = Field(256, ge=0, description="requests waiting at a replica before 429")
    max_queued_tokens: int = Field(1 << 20, ge=1, description="prompt tokens waiting at a replica before 429")
    request_timeout: float = Field(600.0, gt=0, description="seconds from arrival to 504")
    use_paged_attention: bool = Field(True, description="off: one page of max_model_len a sequence")
    page_size: int | None = Field(None, ge=1, description="tokens in a KV page; default: the attention backend's")
    num_pages: int | None = Field(
        None, ge=1, description="KV pages; default: max_batch_size whole contexts, or what fits"
    )
    memory_fraction: float = Field(0.9, gt=0, le=1, description="of the free memory, for KV pages and a step's forward")
    enable_prefix_cache: bool = True
    depth: int = Field(1, ge=0, le=1, description="steps launched ahead of the one being committed")

    speculation: Literal["auto", "off", "ngram", "draft"] = Field(
        "auto", description="who proposes tokens that are verified; auto: the draft_model if there is one, else nobody"
    )
    draft_model: str | None = Field(
        None, description="folder, .gguf file or hub id of a smaller model with the same tokens"
    )
    draft_placement: Literal["actor", "replica"] = Field(
        "actor", description="where the draft runs: in processes of its own that serve all engines, or in each engine's"
    )
    num_drafts: int = Field(
        1, ge=1, le=1024, description="draft processes for num_replicas engines; with more engines more"
    )
    draft_num_gpus: float = Field(0.0, ge=0, le=1, description="share of a GPU for each; 0: on the CPU")
    gamma: int | None = Field(None, ge=1, le=16, description="tokens drafted at a time; default: as many as pay")

    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = Field(
        "auto", description="form of the model's tool calls; auto: the one in its chat template"
    )

    adapters: list[str] = Field(default_factory=list, description="name=folder of LoRA adapters, PEFT's form")
    max_adapters: int | None = Field(
        None, ge=0, description="adapters in memory, the least recently used goes; default: as many as `adapters`"
    )
    tensor_parallel_size: int = Field(1, ge=1, description="processes, a device each, that share a replica's model")

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; beyond loopback a key is required")
    port: int = Field(8000, ge=1, le=65535)
    api_key: SecretStr | None = Field(None, description="clients must send it; better set in the environment")
    api_keys: dict[SecretStr, int] = Field(
        default_factory=dict, description="further keys, and the best priority (lower runs earlier) of each"
    )
    max_body_bytes: int = Field(4 << 20, ge=1024, description="larger request bodies get 413")

    otlp_traces_endpoint: str | None = Field(
        None, pattern=r"^https?://", description="OTLP/HTTP collector, .../v1/traces; needs pilotfish[otel]"
    )

    num_replicas: int = Field(1, ge=1, le=1024, description="engines")
    max_replicas: int | None = Field(
        None, ge=1, le=1024, description="engines at most: more than num_replicas by queue and KV pages"
    )
    upscale_delay: float = Field(10.0, ge=0, description="seconds of pressure before an engine more")
    downscale_delay: float = Field(300.0, ge=0, description="seconds without it before an engine less")
    num_routers: int = Field(1, ge=1, le=1024, description="HTTP front processes")
    num_threads: int | None = Field(None, ge=1, description="CPU threads of an engine; default: all cores but one")
    omp_wait_policy: Literal["passive", "active"] = Field("passive", description="active: idle threads spin")
    heartbeat_timeout: float = Field(5.0, gt=0, description="silent seconds before a replica's requests move away")
    step_timeout: float = Field(120.0, gt=0, description="seconds without a step before a replica is unhealthy")

    @model_validator(mode="before")
    @classmethod
    def _known_names_only(cls, data: Any) -> Any:
        known = list(cls.model_fields)
        if isinstance(data, Mapping):
            for name in data:
                if name not in cls.model_fields:
                    raise ConfigError(unknown_option(str(name), known))
        for variable in os.environ:
            if variable.upper().startswith(ENV_PREFIX) and variable[len(ENV_PREFIX) :].lower() not in cls.model_fields:
                raise ConfigError(unknown_option(variable, [ENV_PREFIX + name.upper() for name in known]))
        return data

    @field_validator("speculation", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # as YAML reads it

    @field_validator("api_key", mode="after")
    @classmethod
    def _empty_key_is_none(cls, key: SecretStr | None) -> SecretStr | None:
        return None if key is None else _stripped(key) or None

    @field_validator("api_keys", mode="after")
    @classmethod
    def _no_key_is_empty(cls, keys: dict[SecretStr, int]) -> dict[SecretStr, int]:
        stripped = {_stripped(key): priority for key, priority in keys.items()}
        if not all(stripped):
            raise ValueError("a key is empty")
        return stripped

    @field_validator("model", "served_model_name", "tokenizer")
    @classmethod
    def _not_blank(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("is empty")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> ServingConfig:
        if not self.use_paged_attention and self.page_size is not None:
            raise ValueError("page_size needs use_paged_attention: without it a page is a whole context")
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise ValueError(f"max_replicas {self.max_replicas} is below num_replicas {self.num_replicas}")
        if self.api_keys and self.api_key is None:
            raise ValueError("api_keys needs api_key, the operator's own")
        if not all(-1000 <= priority <= 1000 for priority in self.api_keys.values()):
            raise ValueError("api_keys: a priority lies in -1000..1000")
        if self.speculation == "draft" and self.draft_model is None:
            raise ValueError("speculation draft needs a draft_model")
        if self.draft_model is not None and self.proposer != "draft":
            raise ValueError(f"draft_model needs speculation auto or draft, not {self.speculation}")
        if self.gamma is not None and self.proposer == "off":
            raise ValueError("gamma needs speculation ngram or a draft_model")
        for name in ("draft_placement", "num_drafts", "draft_num_gpus"):
            if name in self.model_fields_set and self.draft_model is None:
                raise ValueError(f"{name} needs a draft_model")
            if name != "draft_placement" and name in self.model_fields_set and not self.has_draft_actors:
                raise ValueError(f"{name} needs draft_placement actor")
        for name in self.adapter_paths():
            if name in self.model_names():
                raise ValueError(f"adapters: {name} is a name of the model")
        if self.adapters and self.max_adapters is not None and self.max_adapters < len(self.adapters):
            raise ValueError(f"max_adapters {self.max_adapters} is less than the {len(self.adapters)} of adapters")
        if self.quantization is not None and (self.device.startswith("cuda") or self.tensor_parallel_size > 1):
            raise ValueError("quantization is for CPUs, without tensor_parallel_size")
        if self.tensor_parallel_size > 1 and (self.adapter_limit or self.model == DUMMY_MODEL):
            what = "adapters" if self.adapter_limit else "the dummy model"
            raise ValueError(f"tensor_parallel_size doesn't go with {what}")
        if self.model_class is not None and self.model == DUMMY_MODEL:
            raise ValueError("model_class needs a model with weights, not dummy")
        if self.generation_backend == "eager" and "max_batch_size" in self.model_fields_set and self.max_batch_size > 1:
            raise ValueError(
                "max_batch_size above 1 needs generation_backend batched: eager runs one request at a time"
            )
        return self

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ServingConfig:
        """Explicit options over the environment. Raises ConfigError with one line that names the option."""
        if odd := [name for name in options if not isinstance(name, str)]:
            raise ConfigError(unknown_option(str(odd[0]), cls.model_fields))
        try:
            return cls(**options)
        except ValidationError as error:
            raise ConfigError("; ".join(_one_line(e) for e in error.errors())) from None
        except SettingsError as error:  # which has the option's name in its text alone
            name = str(error).split('"')[1].upper()
            raise ConfigError(f"{ENV_PREFIX}{name}: lists and maps are JSON in the environment") from None

    @property
    def meaning(self) -> str:
        """The same where token ids mean the same: what a Router's text becomes, an engine can read."""
        return repr((self.model, self.revision, self.tokenizer, self.model_class))

    @property
    def version(self) -> str:
        """The same in Routers and replicas that were deployed together, and in no others but for their keys."""
        options = self.model_dump(exclude={"api_key", "api_keys"})
        return hashlib.blake2b(repr(sorted(options.items())).encode(), digest_size=8).hexdigest()

    def adapter_paths(self) -> dict[str, str]:
        """Folder by name, of `adapters`. Raises ValueError."""
        paths: dict[str, str] = {}
        for entry in self.adapters:
            name, _, path = entry.partition("=")
            if not name or not path or name in paths:
                raise ValueError(f"adapters: {entry!r} is not name=folder" if name not in paths else f"two are {name}")
            paths[name] = path
        return paths

    @property
    def adapter_limit(self) -> int:
        return len(self.adapters) if self.max_adapters is None else self.max_adapters

    @property
    def proposer(self) -> Literal["off", "ngram", "draft"]:
        """`speculation`, decided."""
        if self.speculation != "auto":
            return self.speculation
        return "off" if self.draft_model is None else "draft"

    @property
    def has_draft_actors(self) -> bool:
        return self.proposer == "draft" and self.draft_placement == "actor"

    @property
    def engines_per_draft(self) -> int:
        return math.ceil(self.num_replicas / self.num_drafts)

    @property
    def max_drafts(self) -> int:
        return max(self.num_drafts, math.ceil((self.max_replicas or 0) / self.engines_per_draft))

    def of_draft(self) -> ServingConfig:
        """Options for loading the draft as a model."""
        return self.model_copy(update={"model": self.draft_model, "revision": None, "model_class": None})

    def keys(self) -> dict[str, int | None]:
        """The keys that clients may send, and the best priority that each gives: None for any."""
        first = {} if self.api_key is None else {self.api_key.get_secret_value(): None}
        return {**{key.get_secret_value(): priority for key, priority in self.api_keys.items()}, **first}

    def model_names(self) -> list[str]:
        """Names a client may put into `model`, the first one being the one that answers carry."""
        name = self.served_model_name or Path(self.model.rstrip("/")).name.removesuffix(".gguf")
        return list(dict.fromkeys([name, *self.model_aliases]))

    def check_files(self) -> None:
        """Raises ConfigError if the model or the tokenizer is a path with nothing there (hub ids aren't looked up)."""
        for option, value in (
            ("model", self.model),
            ("tokenizer", self.tokenizer),
            ("draft_model", self.draft_model),
            *(("adapters", path) for path in self.adapter_paths().values()),
        ):
            if value is not None and looks_like_path(value) and not Path(value).expanduser().exists():
                raise ConfigError(f"{option}: no such file or folder: {value}")


def _one_line(error: Any) -> str:
    loc = error["loc"][:1] if error["loc"][:1] == ("api_keys",) else error["loc"]  # what follows is a key
    where = ".".join(str(part) for part in loc)
    if error["type"] == "missing":
        return f"{where}: required (as an option or as {ENV_PREFIX}{where.upper()})"
    message = error["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def unknown_option(name: str, known: Iterable[str]) -> str:
    """The message for an option nobody knows."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"unknown option {name}" + (f": did you mean {near[0]}?" if near else "")


def _stripped(key: SecretStr) -> SecretStr:
    """As a header brings it; a secret made of a file ends in a newline."""
    return SecretStr(key.get_secret_value().strip())


def looks_like_path(value: str) -> bool:
    """Whether a model name is a path rather than a hub id (`name` or `owner/name`)."""
    return value.startswith(("/", ".", "~")) or value.endswith(".gguf") or value.count("/") > 1


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`: 127.0.0.0/8, ::1 in any spelling, or localhost."""
    host = host.strip().removeprefix("[").removesuffix("]")
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def check_otlp(config: ServingConfig) -> None:
    """Raises ConfigError where traces are wanted and this machine hasn't what makes them."""
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # of a package above it
        found = False
    if config.otlp_traces_endpoint is not None and not found:
        raise ConfigError("otlp_traces_endpoint needs OpenTelemetry: pip install 'pilotfish[otel]'")


def check_bind(host: str, api_key: SecretStr | str | None) -> None:
    """Raises ConfigError when `host` is reachable from elsewhere and there is no key."""
    key = api_key.get_secret_value() if isinstance(api_key, SecretStr) else api_key
    if not (key and key.strip()) and not is_loopback(host):
        raise ConfigError(
            f"host {host} is reachable from other machines and no api_key is set: "
            f"set {ENV_PREFIX}API_KEY, or listen on 127.0.0.1"
        )
