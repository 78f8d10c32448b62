"""Load the classes that `engine.backend` and `trainer.backend` name, and check that they support the run.

`dora.engine.interface` has the protocols that they implement.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import isfunction, signature
from typing import Any

from dora.config.schema import Config, EngineKind
from dora.engine.interface import (
    Capabilities,
    InferenceEngine,
    InferenceFactory,
    TrainingEngine,
    TrainingFactory,
    required_members,
)
from dora.engine.messages import MigratesBetweenMachines
from dora.errors import ConfigError
from dora.loading import load_attribute
from dora.runtime.process.messages import EngineSpec, TrainerSpec
from dora.text import plural

TRAINER_KEY = "trainer.backend"
BUILT_IN = {
    "vllm": "dora.engine.backends.vllm:Vllm",
    "vllm-lora": "dora.engine.backends.vllm:VllmLora",
    "sglang": "dora.engine.backends.sglang:Sglang",
    "sglang-lora": "dora.engine.backends.sglang:SglangLora",
    "transformers": "dora.engine.backends.transformers_engine:Transformers",
}
ENGINE_ARGUMENTS = ("model", "max_rows", "max_context", "version_slots", "device", "dtype")


def check_backends(config: Config) -> None:
    """Raises ConfigError, with all remedies, if a backend does not support what the run needs of it.

    A trainer's class is checked for its methods only.
    """
    if config.trainer.backend is not None:
        trainer = load_attribute(config.trainer.backend, TRAINER_KEY, ConfigError)
        _check_methods(trainer, TrainingEngine, f"{TRAINER_KEY} = {config.trainer.backend!r}")
    for kind in config.engine_kinds:
        if kind.backend is not None:
            _check_engine(config, kind, kind.backend)


def engines_without_images(config: Config) -> list[str]:
    """The settings of engines that cannot read images; DORA-RL's own engine cannot."""
    kinds = config.engine_kinds
    return [
        f"{kind.key}.backend = {kind.backend or 'dora'}"
        for kind in kinds
        if kind.backend is None or not _load_engine(kind.backend, f"{kind.key}.backend").capabilities.images
    ]


def make_engine(spec: EngineSpec) -> InferenceEngine:
    """The backend's engine; called in the engine's process."""
    from dora.runtime.process.remote_kv import RemoteKVTransport, shared_clock

    assert spec.backend is not None
    factory: Any = _load_engine(spec.backend, "engine.backend")  # untyped, because its options are its own
    names = _own_arguments(factory, spec.inflight_update is not None, spec.num_gpus, spec.returns_routes)
    own = {name: getattr(spec, name) for name in names} | {"model": str(spec.model)}
    engine: InferenceEngine = factory(**own, **(spec.backend_options or {}))
    if spec.host is not None and isinstance(engine, MigratesBetweenMachines):
        engine.connect(RemoteKVTransport(spec.broker).open_handoff, shared_clock)
    return engine


def make_trainer(spec: TrainerSpec) -> TrainingEngine:
    """The backend's trainer, with the weights of the run's model or of a checkpoint."""
    from dora.model.pretrained import load_pretrained
    from dora.runtime.process.resources import use_device
    from dora.trainer.checkpoint import load_checkpoint

    assert spec.backend is not None
    factory: TrainingFactory = load_attribute(spec.backend, TRAINER_KEY, ConfigError)
    config, flat = load_pretrained(spec.model)
    state = None
    if spec.checkpoint is not None:
        _, flat, state, _ = load_checkpoint(spec.checkpoint)
    trainer = factory(config=config, flat=flat, settings=spec.settings, device=use_device(spec.device))
    if state is not None:
        trainer.load_state_dict(state)
    return trainer


def _check_engine(config: Config, kind: EngineKind, backend: str) -> None:
    key = f"{kind.key}.backend"
    setting = f"{key} = {backend!r}"
    factory = _load_engine(backend, key)
    _check_methods(factory, InferenceEngine, setting)
    if remedies := [*_missing_capabilities(config, kind, factory.capabilities)]:
        raise ConfigError(
            f"{setting} does not support what the configuration needs:\n  " + "\n  ".join(remedies)
        )
    options = f"{kind.key}.options = {kind.options}"
    _check_arguments(config, kind, factory, f"{options}: {backend}")
    if (check_options := getattr(factory, "check_options", None)) is not None:
        try:
            check_options(**kind.options)
        except ConfigError as error:
            raise ConfigError(f"{options}: {error}") from error
    num_engines = kind.num_engines + (kind.key == "engine" and config.trainer.elastic)
    if "url" in kind.options and num_engines > 1:
        raise ConfigError(
            f"{kind.key}.options has the url of one server, which serves one engine, but there are "
            f"{num_engines} engines: set num_engines = 1, and add a table [[fleet]] for each other server"
        )


def _check_arguments(config: Config, kind: EngineKind, factory: InferenceFactory, setting: str) -> None:
    """Raises ConfigError if the class does not take the arguments of `make_engine`."""
    num_gpus, returns_routes = config.engine.gpus_per_engine, config.trainer.routing_replay
    own = dict.fromkeys(_own_arguments(factory, config.breaks_c1, num_gpus, returns_routes))
    set_here = {*own, "inflight_update", "pool", "host", "num_gpus", "images", "returns_routes"}
    if repeated := kind.options.keys() & set_here:
        raise ConfigError(f"{setting}: DORA-RL sets {min(repeated)} itself; remove it")
    call, given = signature(factory), {**own, **kind.options}
    for bind, arguments, remedy in (
        (call.bind_partial, own, "a backend takes the keywords of dora.engine.interface.InferenceFactory"),
        (call.bind_partial, given, "remove it"),
        (call.bind, given, "add it"),
    ):
        try:
            bind(**arguments)
        except TypeError as error:
            raise ConfigError(f"{setting} {error}; {remedy}") from error


def _own_arguments(
    factory: InferenceFactory, updates_inflight: bool, num_gpus: int, returns_routes: bool
) -> list[str]:
    """The fields of `EngineSpec` that a class of engines gets as arguments."""
    taken, has = signature(factory).parameters, factory.capabilities
    optional = {
        "inflight_update": updates_inflight,
        "pool": has.kv_transfer and "pool" in taken,  # requests migrate with their KV, through what it gets
        "host": hasattr(factory, "connect") and "host" in taken,  # requests migrate between machines
        "num_gpus": num_gpus > 1,
        "images": has.images,
        "returns_routes": returns_routes,
    }
    return [*ENGINE_ARGUMENTS, *(name for name, is_given in optional.items() if is_given)]


def _load_engine(name: str, key: str) -> InferenceFactory:
    factory = load_attribute(BUILT_IN.get(name, name), key, ConfigError)
    if not isinstance(getattr(factory, "capabilities", None), Capabilities):
        raise ConfigError(
            f"{key} = {name!r} has no attribute capabilities; set it to a dora.engine.interface.Capabilities"
        )
    checked: InferenceFactory = factory
    return checked


def _check_methods(factory: object, protocol: type, setting: str) -> None:
    """Raises ConfigError for missing methods. Attributes are not checked: an instance may set them.

    Nothing is checked where attributes are dynamic or the factory is not a class.
    """
    if not isinstance(factory, type) or hasattr(factory, "__getattr__"):
        return
    methods = (name for name in required_members(protocol) if isfunction(vars(protocol).get(name)))
    if missing := [name for name in methods if not callable(getattr(factory, name, None))]:
        raise ConfigError(
            f"{setting} has no {', '.join(missing)}; the class must have all methods of "
            f"dora.engine.interface.{protocol.__name__}, and dora.testing has contract tests for it"
        )


def _missing_capabilities(config: Config, kind: EngineKind, has: Capabilities) -> Iterator[str]:
    """What the configuration needs and the engine does not support, each with its remedy."""
    sampling, engine, orchestrator = config.sampling, config.engine, config.orchestrator
    if not config.has_static_placement and not has.migrates_without_kv:
        yield "no migration of running requests: set orchestrator.placement = static"
    if has.max_versions is not None and kind.version_slots > has.max_versions:
        most = f"at most {plural(has.max_versions, 'version')} at a time"
        if not config.breaks_c1:
            yield f"{most}: set {kind.key}.version_slots = {has.max_versions}"
        elif has.inflight_update:
            policy = f"update_policy = {orchestrator.update_policy}"
            yield f"{most}, and {policy} needs {kind.version_slots}: set orchestrator.update_policy = dora"
    if has.versions_are_lora and not config.run.steps:
        yield "its versions are LoRA adapters, and an evaluation loads all weights: choose another backend"
    elif has.versions_are_lora and not config.trainer.lora_rank:
        yield "its versions are LoRA adapters: set trainer.lora_rank, or choose another backend"
    if config.prioritizes_stragglers and not 0 < has.decode_only <= kind.version_slots:
        slots = f", or {kind.key}.version_slots = {has.decode_only}" if has.decode_only else ""
        yield f"no decoding of selected requests only: set orchestrator.prioritize_stragglers = false{slots}"
    if not has.pauses and (orchestrator.placement == "colocated" or config.trainer.elastic):
        yield "no pause while the trainer works: remove placement = colocated and trainer.elastic"
    if not has.filters and sampling.has_filters and config.run.steps:
        instead = ", or set only those of eval" if has.eval_filters else ""
        yield f"no filters in training: remove sampling.top_k, top_p and min_p{instead}"
    elif not (has.filters or has.eval_filters) and config.eval_sampling.has_filters:
        yield "no filters, it samples from all tokens: remove top_k, top_p and min_p of eval and sampling"
    if not has.stop_strings and sampling.stop:
        yield "no stop strings: remove sampling.stop, or use sampling.stop_token_ids"
    if not has.episodes and config.has_episodes:
        yield "no multi-turn episodes: remove env.environment, env.hosts and service.agents"
    if engine.gpus_per_engine > 1 and not has.tensor_parallel:
        yield "it computes on one GPU: set engine.gpus_per_engine = 1"
    if config.breaks_c1 and not has.inflight_update:
        yield "requests keep their version: set orchestrator.update_policy = dora"
    if config.trainer.routing_replay and not has.routes:
        yield "no routes of experts: set trainer.routing_replay = false"
    if engine.exact_logprobs:  # bitwise equal to those of `LogprobScorer`, which needs our kernels
        yield "no exact log-probs: set engine.exact_logprobs = false"
    if engine.dtype not in has.dtypes:
        yield f"no engine.dtype = {engine.dtype}: use {' or '.join(has.dtypes)}"
    if (device := engine.device.partition(":")[0]) not in has.devices:
        yield f"no engine.device = {device}: use {' or '.join(has.devices)}"
