"""Engines that DORA has not written: loaded by name, asked what they can do, held to it.

`dora.runtime.stations` says what one must offer.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import isfunction, signature
from typing import Any

from dora.config import Config
from dora.errors import ConfigError
from dora.fleets import Engines, kinds
from dora.loading import load_attribute
from dora.runtime.messages import EngineSpec, TrainerSpec
from dora.runtime.stations import (
    Capabilities,
    InferenceEngine,
    InferenceFactory,
    TrainingEngine,
    TrainingFactory,
    members,
)

TRAINER_KEY = "trainer.adapter"
BUILT_IN = {
    "vllm": "dora.backends.vllm:Vllm",
    "vllm-lora": "dora.backends.vllm_lora:VllmLora",
    "sglang": "dora.backends.sglang:Sglang",
}
MADE_WITH = ("model", "max_rows", "max_context", "version_slots", "device", "dtype")


def check(config: Config) -> None:
    """Raises ConfigError, with all remedies at once, if the adapter cannot do what the run asks of it.

    Of a trainer it is only asked whether its methods are there.
    """
    if config.trainer.adapter is not None:
        trainer = load_attribute(config.trainer.adapter, TRAINER_KEY, ConfigError)
        _check_methods(trainer, TrainingEngine, f"{TRAINER_KEY} = {config.trainer.adapter!r}")
    for kind in kinds(config):
        if kind.adapter is not None:
            _check_kind(config, kind, kind.adapter)


def _check_kind(config: Config, kind: Engines, adapter: str) -> None:
    what = f"{kind.key}.adapter = {adapter!r}"
    factory = _load(adapter, what)
    _check_methods(factory, InferenceEngine, what)
    if lacking := [*_lacking(config, kind, factory.capabilities)]:
        raise ConfigError(f"{what} cannot do what the configuration asks of it:\n  " + "\n  ".join(lacking))
    try:
        signature(factory).bind(**dict.fromkeys((*MADE_WITH, *kind.options)))
    except TypeError as error:
        raise ConfigError(f"{kind.key}.options = {kind.options}: {adapter} {error}; remove it") from error
    if (check_options := getattr(factory, "check_options", None)) is not None:
        try:
            check_options(**kind.options)
        except ConfigError as error:
            raise ConfigError(f"{kind.key}.options = {kind.options}: {error}") from error
    num_engines = kind.num_engines + (kind.key == "engine" and config.trainer.elastic)
    if "url" in kind.options and num_engines > 1:
        raise ConfigError(
            f"{kind.key}.options has the url of a server, which is one engine, and there are {num_engines}: "
            "set num_engines = 1, and write a table [[fleet]] for each other server"
        )


def make(spec: EngineSpec) -> InferenceEngine:
    """The adapter's engine, in the process it is to live in."""
    assert spec.adapter is not None
    factory: Any = _load(spec.adapter, f"adapter = {spec.adapter!r}")  # its options are its own
    engine: InferenceEngine = factory(
        model=str(spec.model),
        max_rows=spec.max_rows,
        max_context=spec.max_context,
        version_slots=spec.version_slots,
        device=spec.device,
        dtype=spec.dtype,
        **(spec.options or {}),
    )
    return engine


def make_trainer(spec: TrainerSpec) -> TrainingEngine:
    """The adapter's trainer, at the beginning or where a checkpoint says."""
    from dora.model.folder import load_folder
    from dora.runtime.devices import use_device
    from dora.trainer.checkpoint import load_checkpoint

    assert spec.adapter is not None
    factory: TrainingFactory = load_attribute(spec.adapter, TRAINER_KEY, ConfigError)
    config, flat = load_folder(spec.model)
    state = None
    if spec.checkpoint is not None:
        _, flat, state, _ = load_checkpoint(spec.checkpoint)
    trainer = factory(config=config, flat=flat, settings=spec.settings, device=use_device(spec.device))
    if state is not None:
        trainer.load_state_dict(state)
    return trainer


def _load(name: str, what: str) -> InferenceFactory:
    factory = load_attribute(BUILT_IN.get(name, name), what.partition(" = ")[0], ConfigError)
    if not isinstance(getattr(factory, "capabilities", None), Capabilities):
        raise ConfigError(
            f"{what} has no attribute capabilities; give it one, of the class "
            "dora.runtime.stations.Capabilities"
        )
    found: InferenceFactory = factory
    return found


def _check_methods(factory: object, protocol: type, what: str) -> None:
    """Raises ConfigError for methods that a class lacks; its other members may be made with each object."""
    if not isinstance(factory, type) or hasattr(factory, "__getattr__"):  # nobody can tell
        return
    methods = (name for name in members(protocol) if isfunction(vars(protocol).get(name)))
    if missing := [name for name in methods if not callable(getattr(factory, name, None))]:
        raise ConfigError(
            f"{what} has no {', '.join(missing)}; a class must have all that "
            f"dora.runtime.stations.{protocol.__name__} asks for, and dora.contract has tests of it"
        )


def _lacking(config: Config, kind: Engines, can: Capabilities) -> Iterator[str]:
    """What is asked of a kind of engines and not offered, with the remedy."""
    sampling, engine, orchestrator = config.sampling, config.engine, config.orchestrator
    if not config.is_static and not can.reprefills:
        yield "its requests stay where they are: set orchestrator.placement = static"
    if can.max_versions is not None and kind.version_slots > can.max_versions:
        most = can.max_versions
        yield f"it holds {most} versions at most: set {kind.key}.version_slots = {most}"
    if can.are_adapters and not config.trainer.lora_rank:
        yield "its versions are LoRA adapters: set trainer.lora_rank, or take another adapter"
    if orchestrator.rush and not can.rushes:
        yield "its rows do not stand still for a late one: set orchestrator.rush = false"
    if not can.pauses and (orchestrator.placement == "colocated" or config.trainer.elastic):
        yield "it does not rest while the trainer works: remove placement = colocated and trainer.elastic"
    if not can.filters and (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
        yield "it draws from all tokens: remove sampling.top_k, top_p and min_p"
    if not can.stop_strings and sampling.stop:
        yield "it knows no stop strings: remove sampling.stop, or use sampling.stop_token_ids"
    if not can.episodes and config.has_episodes:
        yield "it writes whole answers: remove env.environment, env.hosts and service.agents"
    if config.trainer.routing_replay:
        yield "it does not tell the experts of each token: set trainer.routing_replay = false"
    if engine.exact:
        yield "its log-probs are not exact: set engine.exact = false"
    if engine.dtype not in can.dtypes:
        yield f"it knows no engine.dtype = {engine.dtype}: use {' or '.join(can.dtypes)}"
    if (device := engine.device.partition(":")[0]) not in can.devices:
        yield f"it does not compute on engine.device = {device}: use {' or '.join(can.devices)}"
