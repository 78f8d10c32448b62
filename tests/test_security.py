"""Forbidden calls, listening modules and what guards them: complete tables. See docs/security.md."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.test_architecture import modules

from dora.cli import train
from dora.config.schema import ServiceSection
from dora.dashboard.server import HOST

ROOT = Path(__file__).parent.parent
LOOPBACK = "127.0.0.1"

# Calls that execute or unpickle their arguments.
FORBIDDEN = (
    *("eval", "exec", "__import__", "os.system", "os.popen", "subprocess.getoutput", "tempfile.mktemp"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.load", "numpy.load", "joblib.load"),
    *("dill.load", "dill.loads", "cloudpickle.load", "cloudpickle.loads", "torch.hub.load"),
)
# (module, call) -> why it is allowed.
ALLOWED = {
    (
        "dora.engine.kv_transfer.handoff",
        "pickle.loads",
    ): "shared memory of this run in a folder that only its owner can enter",
    (
        "dora.engine.kv_transfer.device_kv",
        "pickle.loads",
    ): "a file of this run in the same folder",
    (
        "dora.runtime.process.rpc",
        "pickle.loads",
    ): "of a process of this run: CURVE has checked its key",
    ("dora.rewards.sandbox.fork_server", "exec"): "in a sandbox: the untrusted program",
    ("dora.rewards.sandbox.assertions", "exec"): "the same",
    (
        "dora.rewards.sandbox.assertions",
        "eval",
    ): "in a sandbox: calls of that program; in another sandbox: assertions of the dataset",
}
# Modules that unpickle data of a connection: only pipes between parent and child, and ranks of a trainer.
UNPICKLING = {
    "multiprocessing": {"dora.runtime.process.worker_process"},
    "torch.distributed.scatter_object_list": {"dora.trainer.distributed"},
    "torch.distributed.gather_object": {"dora.trainer.distributed"},
}
# Listening module -> what guards it, and the tests of that.
LISTENS = {
    "dora.service.server": (
        "a bearer token; loopback, unless service.host says otherwise",
        "tests/service/test_auth.py::test_a_wrong_token_is_refused_before_the_body_is_read",
        "tests/service/test_auth.py::test_only_health_and_the_page_of_the_api_need_no_token",
    ),
    "dora.dashboard.server": (
        "a token in its address; loopback",
        "tests/report/test_dashboard.py::test_a_request_without_the_token_is_rejected",
        "tests/report/test_dashboard.py::test_pages_of_other_hosts_are_rejected",
    ),
    "dora.envs.remote": (
        "a token in the first line; loopback, unless --host says otherwise",
        "tests/envs/test_remote.py::test_a_wrong_auth_token_is_refused_before_an_environment_is_made",
        "tests/envs/test_remote.py::test_a_connection_without_a_token_is_closed",
    ),
    "dora.stream.transport": (
        "a Unix socket with mode 0600; CURVE at TCP endpoints, as on a cluster",
        "tests/stream/test_invalid_requests.py::test_the_socket_can_be_used_by_its_owner_only",
        "tests/stream/test_invalid_requests.py::test_a_remote_client_without_the_key_gets_nothing",
    ),
    "dora.runtime.training.trainer_ranks": ("only finds a free port",),
    "dora.engine.backends.server_plugins.dora_vllm_transfer": ("only finds a free port of loopback",),
    "dora.trainer.distributed": (
        "loopback, and a rendezvous in a file that only its owner can read; with ray.trainer_nodes = any the "
        "network, which docs/security.md says",
        "tests/runs/test_trainer_ranks.py::check_closed_to_others",
    ),
    "dora.engine.backends.server": (
        "reserves a port on loopback for a server, which vllm and sglang start",
        "tests/contract/test_vllm.py::test_no_call_is_answered_without_the_auth_token",
        "tests/contract/test_sglang.py::test_the_server_requires_an_auth_token_in_the_environment",
    ),
    "dora.engine.backends.vllm": (
        "an auth token in every request, also in those that --api-key does not guard; loopback",
        "tests/contract/test_vllm.py::test_no_call_is_answered_without_the_auth_token",
    ),
    "dora.engine.backends.sglang": (
        "an auth token in every request but /health; loopback",
        "tests/contract/test_sglang.py::test_the_server_requires_an_auth_token_in_the_environment",
    ),
    "dora.curve": (
        "CURVE: a socket admits the peers that have the secret key of its address",
        "tests/test_curve.py::test_a_stranger_receives_nothing_and_the_server_goes_on",
        "tests/test_curve.py::test_replayed_bytes_are_not_served",
        "tests/test_curve.py::test_a_key_is_valid_for_its_own_socket_only",
    ),
    "dora.runtime.process.rpc": (
        "CURVE: keys for each worker and each KV pool, sent through Ray; loopback, unless ray.address is set",
        "tests/test_curve.py::test_a_stranger_neither_takes_nor_closes_the_channel_of_a_worker",
        "tests/test_curve.py::test_replayed_bytes_are_not_served",
    ),
    "dora.runtime.process.worker_process": (
        "Python's fork server: a Unix socket that only its owner can connect to",
        "tests/test_security.py::test_only_the_owner_can_connect_to_the_fork_server",
    ),
}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
LISTENING = (
    "bind",
    "create_server",
    "start_server",
    "start_unix_server",
    "init_process_group",
    "get_context",
)
# These bind arguments to parameters of a function.
NO_SOCKETS = ("signature.bind", "signature(factory).bind", "bind")
SERVERS = ("HTTPServer", "TCPServer", "UnixStreamServer")


@cache
def parse(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


@cache
def known_names(module: str) -> dict[str, str]:
    """Local name -> imported name, as `np` -> `numpy` and `loads` -> `pickle.loads`."""
    found = {}
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                found[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def calls(module: str) -> Iterator[tuple[str, ast.Call]]:
    """Full name and node of every call; names that are not imported stay as they are written."""
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            first, dot, rest = ast.unparse(node.func).partition(".")
            yield known_names(module).get(first, first) + dot + rest, node


def argument(call: ast.Call, name: str) -> object:
    """The value of a keyword argument; "?" if it is not a constant, None if it is not given."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return ast.literal_eval(keyword.value) if isinstance(keyword.value, ast.Constant) else "?"
    return None


def test_calls_that_execute_data_are_in_the_table_of_allowed_ones() -> None:
    found = {
        (module, name)
        for module in modules()
        for name, call in calls(module)
        if name in FORBIDDEN
        and not (name == "torch.load" and argument(call, "weights_only") is True)
        and not (name == "numpy.load" and argument(call, "allow_pickle") is False)
    }
    assert found == ALLOWED.keys()


def test_no_call_uses_a_shell_pickled_arrays_or_remote_code() -> None:
    for module in modules():
        for name, call in calls(module):
            where = f"{module}, line {call.lineno}: {name}"
            assert argument(call, "shell") in (None, False), where
            assert argument(call, "allow_pickle") in (None, False), where
            assert argument(call, "trust_remote_code") in (None, False), where


def test_transformers_loads_local_files_without_code() -> None:
    for module in modules():
        text = modules()[module].read_text(encoding="utf-8")
        if any(name.endswith(".from_pretrained") for name, _ in calls(module)):
            assert text.count("trust_remote_code") >= 1, module
            assert text.count("local_files_only") >= 1, module
            assert ("AutoModel" in text) <= ("use_safetensors=True" in text), module


@pytest.mark.parametrize("name", UNPICKLING)
def test_only_listed_modules_unpickle_data_of_a_connection(name: str) -> None:
    users = {
        module
        for module in modules()
        if name in {full.partition(".")[0] for full in known_names(module).values()}
        or any(called == name for called, _ in calls(module))
    }
    assert users == UNPICKLING[name]


def test_all_listening_modules_are_in_the_table() -> None:
    found = {
        module
        for module in modules()
        for name, _ in calls(module)
        if name.rpartition(".")[2] in LISTENING and name not in NO_SOCKETS
    } | {
        module
        for module in modules()
        for node in ast.walk(parse(module))
        if isinstance(node, ast.ClassDef)
        if any(ast.unparse(base).endswith(SERVERS) for base in node.bases)
    }
    assert found == LISTENS.keys()


@pytest.mark.parametrize("module", LISTENS)
def test_the_tests_of_each_guard_exist(module: str) -> None:
    _, *tests = LISTENS[module]
    for test in tests:
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, FUNCTION)}, test


def test_servers_listen_on_loopback_by_default() -> None:
    assert LOOPBACK == HOST == ServiceSection().host
    assert inspect.signature(train.env_server).parameters["host"].default == LOOPBACK


def test_only_the_owner_can_connect_to_the_fork_server() -> None:
    """Python sets the mode of the socket, so the test reads its source."""
    from multiprocessing import forkserver, util

    assert "0o600" in inspect.getsource(forkserver.ForkServer.ensure_running)
    assert "mkdtemp" in inspect.getsource(util.get_temp_dir)
