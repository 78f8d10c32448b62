# make demo   install and run the demo
# make test   install and run every check
# make test-vllm VLLM_PYTHON=python   install, and run what needs vLLM, which that interpreter has
# make test-sglang SGLANG_PYTHON=python   the same for SGLang
# make test-agents   install agent frameworks in an environment of their own, and run their episodes
# make test-loaders  install lm-eval and PEFT in an environment of their own, and load a checkpoint with them
# make test-notebooks  install Optuna and Jupyter's kernel in an environment of their own, and run the notebook
#   and the sweep of the examples
# make dash   install, and look at the newest run, or at RUN=DIR
# make dist   build the wheel of the release that the tag of this commit names, in dist
# make docs   install what makes the site, and write it to build/site
# PYTHON=python3.12 names the interpreter, TORCH_INDEX=URL the index torch is taken from,
# CONSTRAINTS=FILE other pins than those for a CPU, VENV=DIR where the environment lies.

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
CONSTRAINTS ?= constraints-cpu.txt
AGENT_FRAMEWORKS := anthropic==2.14.0 litellm==1.110.2 openai-agents==0.24.0 smolagents[openai]==1.26.0 \
  mini-swe-agent==2.4.6 openenv-core==0.3.0
VERIFIERS := verifiers==0.4.0 uv==0.13.9
LOADERS := lm-eval==0.4.13 peft==0.21.2 accelerate==1.15.0
NOTEBOOKS := optuna==5.0.0 nbclient==0.11.0 ipykernel==7.4.0
RUN ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet -c $(CONSTRAINTS)
# More than one thread per process makes small models slower, not faster.
export OMP_NUM_THREADS := 1
# Hundreds of processes import the same modules: compile each once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-agents test-loaders test-notebooks test-vllm test-sglang dash dist docs
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/dora train examples/gcd.toml --out $(RUN)

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# mypy and the swarm take the time that tests leave. The first pytest compiles the tests, which each worker
	@# would do otherwise. A shell's background processes ignore Ctrl-C: the trap ends their group.
	$(BIN)/python -c 'import os, sys; os.setpgid(0, 0); os.execvp(sys.argv[1], sys.argv[1:])' \
	  sh -c 'nice -n 19 $(BIN)/mypy && nice -n 19 $(BIN)/dora simulate swarm --seeds 200' > $(VENV)/checks.log 2>&1 & \
	  pid=$$!; trap 'kill -s TERM -- -$$pid 2> /dev/null; exit 130' INT TERM; \
	  $(BIN)/pytest --collect-only -qq > /dev/null; \
	  $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder; code=$$?; \
	  wait $$pid || code=1; cat $(VENV)/checks.log; exit $$code

test-agents: $(VENV)/.installed-dev $(VENV)-agents/.installed $(VENV)-verifiers/.installed
	AGENTS_PYTHON=$(abspath $(VENV)-agents)/bin/python \
	  VERIFIERS_PYTHON=$(abspath $(VENV)-verifiers)/bin/python $(BIN)/pytest -m agents -rs

test-loaders: $(VENV)/.installed-dev $(VENV)-loaders/.installed
	LOADERS_PYTHON=$(abspath $(VENV)-loaders)/bin/python $(BIN)/pytest -m loaders -rs

test-notebooks: $(VENV)/.installed-dev $(VENV)-notebooks/.installed
	NOTEBOOKS_PYTHON=$(abspath $(VENV)-notebooks)/bin/python $(BIN)/pytest -m notebooks -rs

test-vllm: $(VENV)/.installed-dev
	VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/pytest -m vllm -rs
	$(BIN)/python benchmarks/vllm_fleet.py --quick --vllm-python $(VLLM_PYTHON)

test-sglang: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/vllm_fleet.py --quick --sglang-python $(SGLANG_PYTHON)

dash: RUN = $(firstword $(shell ls -td runs/*/ 2>/dev/null) runs)
dash: $(VENV)/.installed
	$(BIN)/dora dash $(RUN)

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/dora/__init__.py)
dist: $(VENV)/.created
	@test "$$(git describe --tags --exact-match 2>/dev/null)" = v$(VERSION) || { \
	  echo "dora.__version__ is $(VERSION), and this commit has no tag v$(VERSION); try: git tag v$(VERSION)" >&2; exit 1; }
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

docs: $(VENV)/.installed-docs
	$(BIN)/python -m docs.making.tables
	$(BIN)/python -m mkdocs build --clean

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "DORA-RL needs Python 3.11 or newer, and PYTHON=$(PYTHON) is not; try: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(PIP_INSTALL) --index-url $(TORCH_INDEX) torch)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml $(CONSTRAINTS)
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.created pyproject.toml $(CONSTRAINTS)
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed

# They require other versions than DORA-RL's own environment has.
$(VENV)-agents/.installed: Makefile
	$(PYTHON) -m venv $(VENV)-agents
	$(VENV)-agents/bin/python -m pip install --quiet $(AGENT_FRAMEWORKS)
	@touch $@

# verifiers needs another version of OpenAI's client than the others.
$(VENV)-verifiers/.installed: Makefile
	$(PYTHON) -m venv $(VENV)-verifiers
	$(VENV)-verifiers/bin/python -m pip install --quiet $(VERIFIERS)
	@touch $@

$(VENV)-loaders/.installed: Makefile $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)-loaders
	$(VENV)-loaders/bin/python -m pip install --quiet -c $(CONSTRAINTS) $(LOADERS)
	@touch $@

# A notebook and a sweep import DORA-RL, and start runs with their own interpreter.
$(VENV)-notebooks/.installed: pyproject.toml Makefile $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)-notebooks
	$(if $(TORCH_INDEX),$(VENV)-notebooks/bin/python -m pip install --quiet -c $(CONSTRAINTS) --index-url $(TORCH_INDEX) torch)
	$(VENV)-notebooks/bin/python -m pip install --quiet -c $(CONSTRAINTS) -e . $(NOTEBOOKS)
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.created pyproject.toml $(CONSTRAINTS)
	$(PIP_INSTALL) -e '.[docs]'
	@touch $@ $(VENV)/.installed
