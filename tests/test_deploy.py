"""The files of `examples/deploy`: Dockerfiles, the Slurm script, and the YAML of KubeRay and SkyPilot.

Commands must be valid on the command line, and fields must be in the schemas. Scripts run with stand-ins for
Slurm and Ray.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from tests.docs.blocks import ROOT, parse

from dora import __version__
from dora.config import load
from dora.config.schema import Config
from dora.runtime.process.resources import run_resources, total_resources

DEPLOY = ROOT / "examples" / "deploy"
DOCKERFILES = [DEPLOY / "Dockerfile", DEPLOY / "Dockerfile.cuda"]
HOME = "/home/dora"  # of the images
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def config_of(command: str) -> Config:
    """The configuration of a `dora train` command, which must be valid. Its data need not exist here."""
    name, options = parse(command)
    assert (name, options["resume"], options["dry_run"]) == ("train", None, False)
    path = str(options["config"]).removeprefix(f"{HOME}/")
    overrides = [
        re.sub(r"^((?:model|data)\.path)=.*", rf"\1={ROOT}", change) for change in options["overrides"] or []
    ]
    return load.read_config(ROOT / path, overrides)


def fits(config: Config, nodes: int, cpus: float, gpus: int) -> bool:
    """Whether nodes of this size have the resources that a run reserves."""
    needed = total_resources(run_resources(config))
    of_driver = [process for process in run_resources(config) if process.on_driver_node]
    on_one = total_resources(of_driver)
    return all(
        needed.get(name, 0) <= nodes * size and on_one.get(name, 0) <= size
        for name, size in (("CPU", cpus), ("GPU", gpus))
    )


def ray_start_options() -> set[str]:
    """The options of `ray start`, read from its source, because the import takes seconds."""
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:
        pytest.skip("Ray is not installed")
    source = (Path(spec.origin).parent / "scripts" / "scripts.py").read_text(encoding="utf-8")
    return set(re.findall(r'"--([a-z][a-z-]+)"', source))


# Schemas: the fields that the files may use, with the names of Kubernetes, KubeRay and SkyPilot.


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Manifest(Strict):
    """An object of Kubernetes: its fields are in camel case."""

    model_config = ConfigDict(alias_generator=to_camel)


Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Quantity = Annotated[str, Field(pattern=r"^\d+(m|[KMGT]i)?$")] | Annotated[int, Field(ge=1)]
ResourceName = Literal["cpu", "memory", "storage", "nvidia.com/gpu"]
Count = Annotated[int, Field(ge=0)]


class Metadata(Manifest):
    name: Name


class Resources(Manifest):
    requests: dict[ResourceName, Quantity]
    limits: dict[ResourceName, Quantity] = {}


class ClaimSpec(Manifest):
    access_modes: list[Literal["ReadWriteMany"]]
    resources: Resources
    storage_class_name: str | None = None


class Claim(Manifest):
    api_version: Literal["v1"]
    kind: Literal["PersistentVolumeClaim"]
    metadata: Metadata
    spec: ClaimSpec


class Port(Manifest):
    name: Name
    container_port: Annotated[int, Field(ge=1, lt=2**16)]


class Mount(Manifest):
    name: Name
    mount_path: Annotated[str, Field(pattern=r"^/")]


class Container(Manifest):
    name: Name
    image: str
    resources: Resources
    ports: list[Port] = []
    volume_mounts: list[Mount]


class ClaimName(Manifest):
    claim_name: Name


class EmptyDir(Manifest):
    medium: Literal["Memory"]
    size_limit: Quantity


class Volume(Manifest):
    name: Name
    persistent_volume_claim: ClaimName | None = None
    empty_dir: EmptyDir | None = None


class PodSecurity(Manifest):
    run_as_non_root: Literal[True]
    run_as_user: Annotated[int, Field(ge=1000)]
    fs_group: Annotated[int, Field(ge=1000)]


class Toleration(Manifest):
    key: str
    operator: Literal["Exists", "Equal"]
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]


class PodSpec(Manifest):
    security_context: PodSecurity
    tolerations: list[Toleration] = []
    containers: Annotated[list[Container], Field(min_length=1)]
    volumes: list[Volume]


class PodTemplate(Manifest):
    spec: PodSpec


class HeadGroup(Manifest):
    ray_start_params: dict[str, str]
    template: PodTemplate


class WorkerGroup(HeadGroup):
    group_name: Name
    replicas: Count
    min_replicas: Count
    max_replicas: Count


class AuthOptions(Manifest):
    mode: Literal["token"]


class RayCluster(Manifest):
    ray_version: str
    auth_options: AuthOptions
    head_group_spec: HeadGroup
    worker_group_specs: Annotated[list[WorkerGroup], Field(min_length=1)]


class SubmitterConfig(Manifest):
    backoff_limit: Count


class RayJobSpec(Manifest):
    entrypoint: str
    entrypoint_resources: str
    submission_mode: Literal["K8sJobMode", "HTTPMode", "SidecarMode"]
    backoff_limit: Count
    submitter_config: SubmitterConfig
    shutdown_after_job_finishes: bool
    ttl_seconds_after_finished: Count
    ray_cluster_spec: RayCluster


class RayJob(Manifest):
    api_version: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: RayJobSpec


class SkyResources(Strict):
    accelerators: Annotated[str, Field(pattern=r"^[A-Z0-9-]+:\d+$")]
    cpus: Annotated[str, Field(pattern=r"^\d+\+?$")]
    memory: Annotated[str, Field(pattern=r"^\d+\+?$")]
    disk_size: Count


class SkyTask(Strict):
    name: Name
    workdir: str
    num_nodes: Annotated[int, Field(ge=1)]
    resources: SkyResources
    envs: dict[str, str]
    secrets: dict[str, str | None]
    setup: str
    run: str


def documents() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The claim and the RayJob of kuberay.yaml, and the task of skypilot.yaml."""
    claim, job = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text(encoding="utf-8"))
    return claim, job, yaml.safe_load((DEPLOY / "skypilot.yaml").read_text(encoding="utf-8"))


CLAIM, JOB, TASK = documents()
SCHEMAS: list[tuple[type[Strict], dict[str, Any]]] = [(Claim, CLAIM), (RayJob, JOB), (SkyTask, TASK)]
FREE_NAMES = {"rayStartParams", "envs", "secrets"}  # maps whose keys no schema lists


def fields(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all fields of a document."""
    if isinstance(node, list):
        for index, each in enumerate(node):
            yield from fields(each, (*path, index))
    elif isinstance(node, dict) and not (path and path[-1] in FREE_NAMES):
        for key, value in node.items():
            yield (*path, key)
            yield from fields(value, (*path, key))


@pytest.mark.parametrize(("schema", "document"), SCHEMAS, ids=lambda given: getattr(given, "__name__", ""))
def test_yaml_has_the_fields_of_its_schema_and_a_misspelt_one_is_found(
    schema: type[Strict], document: dict[str, Any]
) -> None:
    schema.model_validate(document)
    paths = list(fields(document))
    assert len(paths) > 6
    for *parents, key in paths:
        changed = copy.deepcopy(document)
        node: Any = changed
        for parent in parents:
            node = node[parent]
        node[f"{key}s"] = node.pop(key)
        with pytest.raises(ValidationError):
            schema.model_validate(changed)


def test_the_rayjob_is_consistent() -> None:
    job = RayJob.model_validate(JOB).spec
    cluster = job.ray_cluster_spec
    (worker,) = cluster.worker_group_specs
    assert worker.min_replicas <= worker.replicas <= worker.max_replicas
    options = ray_start_options()
    for group in (cluster.head_group_spec, worker):
        assert {*group.ray_start_params} <= options
        pod = group.template.spec
        volumes = {volume.name: volume for volume in pod.volumes}
        for container in pod.containers:
            assert container.image == f"dora-rl:{__version__}-cuda"
            assert {mount.name for mount in container.volume_mounts} == volumes.keys()
        claims = {claim.claim_name for each in pod.volumes if (claim := each.persistent_volume_claim)}
        assert claims == {CLAIM["metadata"]["name"]}
        assert str(pod.security_context.run_as_user) == last_user(DEPLOY / "Dockerfile.cuda")
    # KubeRay passes the parameters to a shell, so the JSON is quoted once more.
    offered = json.loads(json.loads(worker.ray_start_params["resources"]))
    assert json.loads(job.entrypoint_resources).items() <= offered.items()


def test_the_rayjob_trains_with_the_resources_of_its_workers() -> None:
    job = RayJob.model_validate(JOB).spec
    (worker,) = job.ray_cluster_spec.worker_group_specs
    (container,) = worker.template.spec.containers
    limits = container.resources.limits
    config = config_of(job.entrypoint)
    assert (config.runtime.kind, config.ray.address) == ("ray", "auto")
    assert fits(config, worker.replicas, float(limits["cpu"]), int(limits["nvidia.com/gpu"]))
    assert not fits(config, worker.replicas - 1, float(limits["cpu"]), int(limits["nvidia.com/gpu"]))
    assert job.ray_cluster_spec.head_group_spec.ray_start_params["num-cpus"] == "0"
    command = shlex.split(job.entrypoint)
    assert job.backoff_limit > 0, "KubeRay repeats the command after a failure"
    assert "--auto-resume" in command
    mounts = [mount.mount_path for mount in container.volume_mounts]
    for option in (command[command.index("--out") + 1], *re.findall(r"path=(\S+)", job.entrypoint)):
        assert option.startswith(f"{mounts[0]}/")


# Dockerfiles


@dataclass(frozen=True)
class Instruction:
    name: str
    value: str


def instructions(dockerfile: Path) -> list[Instruction]:
    """The instructions of a Dockerfile, with continuation lines joined."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [Instruction(*line.split(maxsplit=1)) for line in lines if line.strip()]


def values(dockerfile: Path, name: str) -> list[str]:
    return [each.value for each in instructions(dockerfile) if each.name == name]


def last_user(dockerfile: Path) -> str:
    return values(dockerfile, "USER")[-1]


def context_files() -> set[str]:
    """The top of the build context: what .dockerignore does not exclude."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    return {line.removeprefix("!") for line in lines if line.startswith("!")}


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_follows_the_usual_rules(dockerfile: Path) -> None:
    known = {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
    assert {each.name for each in instructions(dockerfile)} <= known
    for image in values(dockerfile, "FROM"):
        assert re.fullmatch(r"[\w./-]+:\d+\.\d+[\w.-]*", image)
    assert last_user(dockerfile).isdecimal()  # runAsNonRoot of Kubernetes needs a number
    assert int(last_user(dockerfile)) >= 1000
    for source in values(dockerfile, "COPY"):
        *names, _ = (word for word in source.split() if not word.startswith("--"))
        assert {*names} <= context_files()
        assert all((ROOT / name).exists() for name in names)
    for command in values(dockerfile, "RUN"):
        subprocess.run(["bash", "-n", "-c", command], check=True)
        if "apt-get" in command:
            assert "apt-get update" in command
            assert command.rstrip().endswith("rm -rf /var/lib/apt/lists/*")
        assert command.count("apt-get install") == command.count("--no-install-recommends")
        assert command.count("pip install") == command.count("--no-cache-dir")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_installs_known_extras_and_runs_the_demo(dockerfile: Path) -> None:
    arguments = dict(value.split("=", 1) for value in values(dockerfile, "ARG"))
    assert {*arguments["EXTRAS"].split(",")} <= PYPROJECT["project"]["optional-dependencies"].keys()
    (entrypoint,), (command,) = (values(dockerfile, name) for name in ("ENTRYPOINT", "CMD"))
    config = config_of(shlex.join([*json.loads(entrypoint), *json.loads(command)]))
    assert config.trainer.device == ("cuda" if dockerfile.suffix else "cpu")
    for line in values(dockerfile, "RUN"):
        for found in re.findall(r"(?:^|&& )(dora [^&]+)", line):
            assert parse(found)[0] == "examples"
    copied = {name for source in values(dockerfile, "COPY") for name in source.split()}
    assert {"src", "examples", "pyproject.toml", "README.md", "LICENSE"} <= copied


def test_versions_in_the_dockerfiles_agree() -> None:
    texts = [path.read_text(encoding="utf-8") for path in DOCKERFILES]
    pinned = (ROOT / "constraints-cpu.txt").read_text(encoding="utf-8").strip()
    assert re.sub(r"\.\d+$", ".*", pinned) in texts[1]
    assert all(f"--tag dora-rl:{__version__}" in text for text in texts)
    ray = re.sub(r"\.\d+$", ".*", JOB["spec"]["rayClusterSpec"]["rayVersion"])
    assert all(f"ray[default]=={ray}" in text for text in texts)


# Scripts, which run with stand-ins for Slurm and Ray. Each stand-in appends its name and arguments to a log.

LOGGED = 'echo "${0##*/} $*" >> "$LOG"\n'
PAUSE = "read -rt 0.02 <> <(:) || :"
STAND_INS = {
    "scontrol": 'printf "node-a\\nnode-b\\nnode-c\\n"',
    # The commands of all nodes run here.
    "srun": LOGGED + 'while [[ $1 == --* ]]; do shift; done; [[ $1 == rm ]] || exec "$@"',
    "sleep": PAUSE,
    "hostname": 'echo "${ADDRESSES:-fd00::2 127.0.1.1 10.0.0.5 10.1.0.5}"',
    # With --block, `ray start` runs until SIGTERM.
    "ray": f"""
        trap 'echo "ray ended" >> "$LOG"; exit 0' TERM
        {LOGGED}
        [[ $RAY_AUTH_MODE == token && ${{#RAY_AUTH_TOKEN}} -ge 16 ]] || exit 9
        [[ -z ${{RAY_FAILS:-}} ]] || {{ [[ $1 == start ]] || {PAUSE}; exit 1; }}
        [[ $1 == start ]] || exec grep -q "^ray start --head" "$LOG"
        [[ $* == *--head* || -z ${{WORKER_ENDS:-}} ]] || exit 1
        while :; do {PAUSE}; done""",
    "dora": f"""
        trap 'echo "dora saved a checkpoint" >> "$LOG"; exit 130' TERM
        while (( $(grep -c "^ray start" "$LOG") < ${{NODES:-1}} )); do {PAUSE}; done
        {LOGGED}
        while [[ -n ${{HANGS:-}} ]]; do {PAUSE}; done
        exit "${{DORA_CODE:-0}}\"""",
}


@dataclass
class Scene:
    """A folder with the stand-ins, and what scripts called."""

    folder: Path

    def environment(self, **variables: str) -> dict[str, str]:
        own = {"LOG": str(self.folder / "log"), "HOME": str(self.folder)}
        return {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", **own, **variables}

    @property
    def log(self) -> list[str]:
        file = self.folder / "log"
        return file.read_text(encoding="utf-8").splitlines() if file.exists() else []

    def first(self, start: str) -> int:
        """The place of the first line of the log that starts like this."""
        return next(index for index, line in enumerate(self.log) if line.startswith(start))

    def dora_command(self) -> str:
        (line,) = [line for line in self.log if line.startswith("dora train")]
        return line


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    (tmp_path / "bin").mkdir()
    for name, body in STAND_INS.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/usr/bin/env bash\n{body}\n")
        program.chmod(0o755)
    return Scene(tmp_path)


SLURM = ["bash", str(DEPLOY / "slurm.sh")]
JOB_VARIABLES = {"SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "node-[a-c]", "SLURM_CPUS_PER_TASK": "16"}
TRAIN = ["examples/gcd.toml", "--out", "runs/a", "--auto-resume"]


def run_slurm(scene: Scene, arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = scene.environment(**{"NODES": "3", **JOB_VARIABLES, **variables})
    return subprocess.run(
        [*SLURM, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_scripts_parse_and_pass_shellcheck(tmp_path: Path) -> None:
    scripts = [DEPLOY / "slurm.sh"]
    for name in ("setup", "run"):
        scripts.append(tmp_path / f"{name}.sh")
        scripts[-1].write_text(f"#!/usr/bin/env bash\n{TASK[name]}")
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True)
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", "--severity=warning", str(script)], check=True)


def test_slurm_starts_ray_on_all_nodes_then_trains_then_stops_ray(scene: Scene) -> None:
    done = run_slurm(scene, TRAIN)
    assert done.returncode == 0, done.stderr
    config = config_of(scene.dora_command())
    assert (config.runtime.kind, config.ray.address) == ("ray", "10.0.0.5:20123")
    head = scene.first("ray start --head --block --node-ip-address=10.0.0.5 --port=20123")
    assert head < scene.first("ray start --block") < scene.first("dora train")
    assert scene.first("ray status --address=10.0.0.5:20123") < scene.first("ray start --block")
    workers = [line for line in scene.log if line.startswith("ray start --block --address=10.0.0.5:20123")]
    assert len(workers) == 2
    steps = [line for line in scene.log if line.startswith("srun")]
    of_ray = [re.findall(r"--nodelist=(\S+)", line)[0] for line in steps if "ray start" in line]
    assert sorted(of_ray) == ["node-a", "node-b", "node-c"]
    (of_dora,) = [line for line in steps if "dora train" in line]
    assert "--nodelist=node-a" in of_dora
    assert all("--overlap" in line for line in steps)
    assert scene.log.count("ray ended") == 3
    assert scene.log[-1] == "srun --overlap --nodes=3 --ntasks-per-node=1 rm -rf -- /tmp/ray-123"
    used = {
        found
        for line in scene.log
        if line.startswith("ray start")
        for found in re.findall(r"--([a-z-]+)", line)
    }
    assert used <= ray_start_options() | {"head", "block"}


def test_slurm_resumes_a_run(scene: Scene) -> None:
    assert run_slurm(scene, ["--resume", "runs/a"]).returncode == 0
    _, options = parse(scene.dora_command())
    assert (options["resume"], options["config"]) == (Path("runs/a"), None)


def test_slurm_stops_ray_and_keeps_the_exit_code_if_the_run_fails(scene: Scene) -> None:
    done = run_slurm(scene, TRAIN, DORA_CODE="3")
    assert done.returncode == 3
    assert "dora train has exited with code 3" in done.stderr
    assert scene.log.count("ray ended") == 3


def test_slurm_forwards_a_signal_and_waits_for_the_checkpoint(scene: Scene) -> None:
    environment = scene.environment(**JOB_VARIABLES, NODES="3", HANGS="1")
    with subprocess.Popen([*SLURM, *TRAIN], env=environment, stdout=subprocess.DEVNULL) as job:
        while not any(line.startswith("dora train") for line in scene.log):
            assert job.poll() is None
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=60) == 130
    assert scene.first("dora saved a checkpoint") < scene.first("ray ended")
    assert scene.log.count("ray ended") == 3


def test_slurm_trains_on_if_a_worker_node_fails(scene: Scene) -> None:
    assert run_slurm(scene, TRAIN, WORKER_ENDS="1").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {}, "no arguments; give those of dora train"),
        (TRAIN, {"SLURM_JOB_ID": ""}, "not in a Slurm job; submit it with sbatch"),
        (TRAIN, {"SLURM_CPUS_PER_TASK": ""}, "give sbatch --cpus-per-task=N"),
        (
            TRAIN,
            {"ADDRESSES": "127.0.1.1 fd00::2"},
            "node-a has no IPv4 address but loopback; set DORA_HEAD_IP",
        ),
        (TRAIN, {"RAY_FAILS": "1"}, "Ray's head on node-a has exited"),
    ],
)
def test_slurm_says_why_it_cannot_start(
    scene: Scene, arguments: list[str], variables: dict[str, str], message: str
) -> None:
    done = run_slurm(scene, arguments, **variables)
    assert done.returncode == 1
    assert message in done.stderr
    assert not any(line.startswith("dora") for line in scene.log)


def test_options_of_sbatch_in_the_script_are_known() -> None:
    text = (DEPLOY / "slurm.sh").read_text(encoding="utf-8")
    options = re.findall(r"^#SBATCH --([a-z-]+)", text, flags=re.MULTILINE)
    known = {"job-name", "output", "nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "exclusive"}
    assert {*options} == known | {"time", "no-kill", "signal"}


def run_sky(scene: Scene, rank: int, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the task's commands as SkyPilot does on one machine."""
    activate = scene.folder / "dora-venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True, exist_ok=True)
    activate.touch()
    declared = {name: "0123456789abcdef" for name in TASK["secrets"]} | TASK["envs"]
    of_sky = {"SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6", "SKYPILOT_NODE_RANK": str(rank)}
    environment = scene.environment(**declared, **of_sky, **variables)
    command = ["bash", "-c", TASK["run"]]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_skypilot_trains_on_the_first_machine(scene: Scene) -> None:
    done = run_sky(scene, 0)
    assert done.returncode == 0, done.stderr
    config = config_of(scene.dora_command())
    address = "10.0.0.5:6385"
    assert (config.runtime.kind, config.ray.address) == ("ray", address)
    assert scene.first("ray start --head") < scene.first("dora train")
    assert f"ray status --address={address}" in scene.log
    assert scene.log[-1] == "ray ended"
    task = SkyTask.model_validate(TASK)
    gpus, cpus = int(task.resources.accelerators.split(":")[1]), float(task.resources.cpus.rstrip("+"))
    assert fits(config, task.num_nodes, cpus, gpus)
    assert not fits(config, task.num_nodes - 1, cpus, gpus)
    assert run_sky(scene, 0, DORA_CODE="3").returncode == 3


def test_skypilot_joins_from_the_other_machine_and_does_not_fail_with_it(scene: Scene) -> None:
    with (scene.folder / "log").open("w") as log:
        log.write("ray start --head\n")  # on the first machine
    assert run_sky(scene, 1, WORKER_ENDS="1").returncode == 0
    assert scene.log[-1] == "ray start --block --address=10.0.0.5:6385 --disable-usage-stats"
    assert scene.first("ray status") < scene.first("ray start --block")


def test_skypilot_installs_known_extras() -> None:
    (extras,) = re.findall(r"pip install '\.\[([\w,]+)\]'", TASK["setup"])
    assert {*extras.split(",")} <= PYPROJECT["project"]["optional-dependencies"].keys()
