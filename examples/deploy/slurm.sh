#!/usr/bin/env bash
# Trains on a Ray cluster of all nodes of this job. The arguments are those of `dora train`:
#
#   sbatch --nodes=2 examples/deploy/slurm.sh my.toml --out runs/a --auto-resume
#
# With --auto-resume a requeued job, or another one with the same command, resumes the run.
# Submit it from a folder that all nodes share, with the environment of DORA-RL activated. To stop the run with a
# checkpoint: scancel --batch --signal=TERM JOB. DORA_HEAD_IP replaces the address of the first node.

#SBATCH --job-name=dora
#SBATCH --output=%x-%j.log
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --no-kill
#SBATCH --signal=B:TERM@300
# --no-kill: the run continues without a node that has failed. --signal: the run saves a checkpoint before the
# time limit.

set -euo pipefail

HEAD_TIMEOUT_S=180
driver=                 # process id of the step that runs dora
ray_steps=()            # process ids of the steps that run Ray, the head first
is_signaled=false

fail() {
    echo "slurm.sh: $*" >&2
    exit 1
}

# A step of one node. --overlap: steps share the resources of the job, because Ray's step never ends by itself.
step_on() {
    local node=$1
    shift
    exec srun --overlap --nodes=1 --ntasks=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --nodelist="$node" "$@"
}

on_signal() {
    is_signaled=true
    [[ -n $driver ]] || exit 143
    kill -TERM "$driver" 2>/dev/null || true    # srun forwards it to dora, which saves a checkpoint
}

stop_ray() {
    local code=$? pid
    trap '' TERM INT
    for pid in $driver "${ray_steps[@]}"; do
        kill -TERM "$pid" 2>/dev/null || true
    done
    wait
    if ((${#ray_steps[@]})); then
        timeout 60 srun --overlap --nodes="${#nodes[@]}" --ntasks-per-node=1 rm -rf -- "$ray_folder" || true
    fi
    exit "$code"
}

[[ -n ${SLURM_JOB_ID:-} && -n ${SLURM_JOB_NODELIST:-} ]] || fail "not in a Slurm job; submit it with sbatch"
(($#)) || fail "no arguments; give those of dora train: a configuration, or --resume RUN"
[[ -n ${SLURM_CPUS_PER_TASK:-} ]] || fail "SLURM_CPUS_PER_TASK is not set; give sbatch --cpus-per-task=N"
for program in dora ray; do
    command -v "$program" >/dev/null || fail "$program is not on PATH; activate the environment before sbatch"
done

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
((${#nodes[@]})) || fail "scontrol lists no node of $SLURM_JOB_NODELIST"
head=${nodes[0]}

# The first IPv4 address of the head that other nodes can reach.
head_ip=${DORA_HEAD_IP:-}
if [[ -z $head_ip ]]; then
    for address in $(step_on "$head" hostname --ip-address); do
        [[ $address =~ ^[0-9]+(\.[0-9]+){3}$ && $address != 127.* ]] || continue
        head_ip=$address
        break
    done
fi
[[ -n $head_ip ]] || fail "$head has no IPv4 address but loopback; set DORA_HEAD_IP"
address=$head_ip:$((20000 + SLURM_JOB_ID % 10000))    # below the ephemeral ports, above those of Ray's workers
ray_folder=/tmp/ray-$SLURM_JOB_ID

# A token of this job. srun passes the variables to all nodes.
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -vN32 -tx1 /dev/urandom | tr -d ' \n')}

trap stop_ray EXIT
trap on_signal TERM INT

echo "slurm.sh: Ray's head is $head, $address; ${#nodes[@]} nodes"
step_on "$head" ray start --head --block --node-ip-address="$head_ip" --port="${address##*:}" \
    --num-cpus="$SLURM_CPUS_PER_TASK" --temp-dir="$ray_folder" --include-dashboard=false --disable-usage-stats &
ray_steps+=($!)
SECONDS=0
until timeout 30 ray status --address="$address" >/dev/null 2>&1; do
    kill -0 "${ray_steps[0]}" 2>/dev/null || fail "Ray's head on $head has exited; its messages are above"
    ((SECONDS < HEAD_TIMEOUT_S)) || fail "Ray's head at $address does not reply after $HEAD_TIMEOUT_S s"
    sleep 1
done

# One step for each node: if one fails, the others continue.
for node in "${nodes[@]:1}"; do
    step_on "$node" ray start --block --address="$address" --num-cpus="$SLURM_CPUS_PER_TASK" --disable-usage-stats &
    ray_steps+=($!)
done

# dora waits runtime.start_timeout_s for the resources that it needs, and then prints what is missing.
step_on "$head" dora train "$@" --set runtime.kind=ray --set ray.address="$address" &
driver=$!
while
    is_signaled=false
    code=0
    wait "$driver" || code=$?
    $is_signaled    # a signal interrupts `wait`
do :; done
driver=
((code == 0)) || echo "slurm.sh: dora train has exited with code $code" >&2
exit "$code"
