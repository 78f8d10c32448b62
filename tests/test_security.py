"""What must not be called, who listens, and by what each is guarded: tables that have to be complete."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.test_architecture import modules

from dora.cli import main
from dora.config.schema import ServiceSection
from dora.dashboard.server import HOST

ROOT = Path(__file__).parent.parent
LOOPBACK = "127.0.0.1"

# Calls that run what they are given, or unpickle it, by where they come from.
FORBIDDEN = (
    *("eval", "exec", "__import__", "os.system", "os.popen", "subprocess.getoutput", "tempfile.mktemp"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.load", "numpy.load", "joblib.load"),
    *("dill.load", "dill.loads", "cloudpickle.load", "cloudpickle.loads", "torch.hub.load"),
)
ALLOWED = {
    (
        "dora.engine.kv_transfer.handoff",
        "pickle.loads",
    ): "a file of this run's, in a folder that only its owner can enter",
    (
        "dora.runtime.process.rpc",
        "pickle.loads",
    ): "what a process of this run has sealed, with a key of its own",
    ("dora.rewards.sandbox.fork_server", "exec"): "in a sandbox: the untrusted program",
    ("dora.rewards.sandbox.assertions", "exec"): "the same",
    (
        "dora.rewards.sandbox.assertions",
        "eval",
    ): "in a sandbox: calls of that program; in another one: the dataset's assertions, with literals for values",
}
# What unpickles what comes through a connection, and is therefore kept to pipes between parent and child, and
# to ranks on one machine.
UNPICKLING = {
    "multiprocessing": {"dora.runtime.process.worker_process"},
    "torch.distributed.scatter_object_list": {"dora.trainer.distributed"},
    "torch.distributed.gather_object": {"dora.trainer.distributed"},
}
# Who listens -> what guards it, and the tests that hold this.
LISTENS = {
    "dora.service.server": (
        "a bearer token; loopback, unless service.host says otherwise",
        "tests/service/test_auth.py::test_a_wrong_token_is_refused_before_the_body_is_read",
        "tests/service/test_auth.py::test_only_health_needs_no_token",
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
        "a Unix socket with mode 0600; an auth token in the first message at TCP endpoints, as on a cluster",
        "tests/stream/test_invalid_requests.py::test_socket_and_token_are_readable_by_their_owner_only",
        "tests/stream/test_invalid_requests.py::test_a_remote_client_without_the_auth_token_gets_no_data",
    ),
    "dora.trainer.distributed": (
        "loopback, and a meeting place in a file of the owner's",
        "tests/runs/test_trainer_ranks.py::check_that_nobody_else_can_come_in",
    ),
    "dora.engine.backends.server": (
        "servers of vLLM and SGLang, on loopback: a token in every request, also where their keys ask none",
        "tests/contract/test_vllm.py::test_no_call_is_answered_without_the_auth_token",
        "tests/contract/test_sglang.py::test_the_server_requires_an_auth_token_in_the_environment",
    ),
    "dora.runtime.process.rpc": (
        "a key for each worker and each pool, which comes through Ray; loopback, unless ray.address is set",
        "tests/runtime/process/test_rpc.py::test_a_message_with_a_wrong_mac_is_never_unpickled",
        "tests/runtime/process/test_rpc.py"
        "::test_a_caller_without_the_key_is_disconnected_and_the_address_stays_valid",
    ),
    "dora.runtime.process.worker_process": (
        "Python's fork server: a Unix socket of its owner's alone, in a folder of its owner's alone",
        "tests/test_security.py::test_the_fork_server_of_python_listens_for_its_owner_alone",
    ),
}
LISTENING = (
    "bind",
    "create_server",
    "start_server",
    "start_unix_server",
    "init_process_group",
    "get_context",
)
NO_SOCKETS = ("signature.bind", "signature(factory).bind")  # arguments to the parameters of a function
SERVERS = ("HTTPServer", "TCPServer", "UnixStreamServer")


@cache
def parse(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


@cache
def known_names(module: str) -> dict[str, str]:
    """Local name -> where it comes from, as `np` -> `numpy` and `loads` -> `pickle.loads`."""
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
    """Full name and node of every call; of what is no module's, the name as it is written."""
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            first, dot, rest = ast.unparse(node.func).partition(".")
            yield known_names(module).get(first, first) + dot + rest, node


def argument(call: ast.Call, name: str) -> object:
    """The value of a keyword, as far as it is written there; None: it is not given."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return ast.literal_eval(keyword.value) if isinstance(keyword.value, ast.Constant) else "?"
    return None


def test_nothing_that_is_loaded_can_run_but_where_a_reason_stands_beside_it() -> None:
    found = {
        (module, name)
        for module in modules()
        for name, call in calls(module)
        if name in FORBIDDEN and not (name == "torch.load" and argument(call, "weights_only") is True)
    }
    assert found == ALLOWED.keys()


def test_no_shell_no_pickled_arrays_and_nobody_elses_code() -> None:
    for module in modules():
        for name, call in calls(module):
            where = f"{module}, line {call.lineno}: {name}"
            assert argument(call, "shell") in (None, False), where
            assert argument(call, "allow_pickle") in (None, False), where
            assert argument(call, "trust_remote_code") in (None, False), where


def test_models_and_tokenizers_of_transformers_are_files_here_without_code() -> None:
    for module in modules():
        text = modules()[module].read_text(encoding="utf-8")
        if any(name.endswith(".from_pretrained") for name, _ in calls(module)):
            assert text.count("trust_remote_code") >= 1, module
            assert text.count("local_files_only") >= 1, module
            assert ("AutoModel" in text) <= ("use_safetensors=True" in text), module


@pytest.mark.parametrize("name", UNPICKLING)
def test_what_unpickles_a_connection_stays_where_it_is(name: str) -> None:
    users = {
        module
        for module in modules()
        if name in {full.partition(".")[0] for full in known_names(module).values()}
        or any(called == name for called, _ in calls(module))
    }
    assert users == UNPICKLING[name]


def test_whoever_listens_is_in_the_table() -> None:
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
def test_each_guard_has_its_tests(module: str) -> None:
    _, *tests = LISTENS[module]
    for test in tests:
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_nobody_listens_beyond_this_machine_unless_told() -> None:
    assert LOOPBACK == HOST == ServiceSection().host
    assert inspect.signature(main.environments).parameters["host"].default == LOOPBACK


def test_the_fork_server_of_python_listens_for_its_owner_alone() -> None:
    """What `ensure_running` does is Python's own, so it is read there."""
    from multiprocessing import forkserver, util

    assert "0o600" in inspect.getsource(forkserver.ForkServer.ensure_running)
    assert "mkdtemp" in inspect.getsource(util.get_temp_dir)
