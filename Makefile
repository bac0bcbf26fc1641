# The everyday commands. `make` alone lists them.
#
#   PYTHON=/path/to/python3   which Python makes .venv (default: the first one of 3.11 or newer)
#   TORCH_INDEX=URL           one more package index for torch, such as PyTorch's CPU builds (see README)
#   ARGS="..."                passed on to `pellucid serve`, pytest, the load test, the benchmark or the soak

.DEFAULT_GOAL := help
.PHONY: help setup serve test load bench soak check proto clean

ARGS ?=
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PROTO_VENV := .venv-proto
# The oldest toolchain that pyproject.toml's lower bounds allow: generated code refuses runtimes older than itself.
PROTO_TOOLS := grpcio-tools==1.76.0
PROTO_FILES := $(wildcard proto/pellucid/v1/*.proto)

PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$name"; break; }; done)
COMPILERS := $(if $(filter environment command,$(origin CXX)),$(firstword $(CXX)),g++ c++ clang++)
COMPILER := $(firstword $(foreach name,$(COMPILERS),$(shell command -v $(name) 2>/dev/null)))
# Named after what it was built with, so that a compiler installed later leads to a new build.
READY := $(VENV)/.ready-$(if $(COMPILER),native,torch)
KERNELS := $(wildcard model/pellucid_model/kernels/build.py model/pellucid_model/kernels/src/*)

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## Make .venv with everything installed in it
	@:

$(READY): pyproject.toml constraints.txt hatch_build.py $(KERNELS)
	@test -n "$(PYTHON)" || { \
		echo "Python 3.11 or newer is needed; python3 here is: $$(python3 --version 2>&1 || true)" >&2; \
		echo "Install one, or name it: make setup PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed; $(PYTHON) is: $$("$(PYTHON)" --version 2>&1)" >&2; exit 1; }
	@test -n "$(COMPILER)" || { \
		echo "No C++ compiler found: torch's own operators will run, slower and not batch-invariant." >&2; \
		echo "To change that install one (Debian, Ubuntu: apt-get install g++) and run make again." >&2; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV) || { \
		echo "Python's venv module is needed (Debian, Ubuntu: apt-get install python3-venv)." >&2; exit 1; }
	@echo "Installing into $(VENV); the first time takes some minutes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		--constraint constraints.txt --editable '.[dev]'
	@rm -f $(VENV)/.ready-* && touch $@

serve: setup ## Serve the bundled checkpoint on 127.0.0.1:50051; ARGS="CHECKPOINT --option ..."
	@exec $(BIN)/pellucid serve $(ARGS)

test: setup ## Run all tests; ARGS="tests/clients -k name"
	@$(BIN)/python -m pytest $(ARGS)

load: setup ## Load-test a server of its own for 30 s; ARGS="--workload chat --slo-ttft 200"
	@exec $(BIN)/python loadtest/run.py $(ARGS)

bench: setup ## Measure speed and memory; ARGS="--model smollm2 --engine pellucid:int8 --engine llama.cpp:q8_0"
	@exec $(BIN)/python loadtest/bench.py $(ARGS)

soak: setup ## 20,000 random requests in a crowd, each compared with itself alone; ARGS="--requests 2000"
	@PYTHONPATH=tests/support exec $(BIN)/python -m pellucid_testing.soak $(ARGS)

check: setup $(PROTO_VENV)/.ready ## Lint, types, formatting, and that generated code is up to date
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && $(call generate,$$fresh) && \
		for file in "$$fresh"/pellucid/v1/*; do diff -u "proto/pellucid/v1/$${file##*/}" "$$file" || stale=yes; done && \
		{ test -z "$$stale" || { echo "The stubs differ from the .proto files: run make proto." >&2; exit 1; }; }
	@echo "All checks passed."

proto: $(PROTO_VENV)/.ready ## Generate the stubs beside the .proto files
	@$(call generate,proto)

$(PROTO_VENV)/.ready: Makefile
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed." >&2; exit 1; }
	@$(PROTO_VENV)/bin/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(PROTO_VENV)
	@$(PROTO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check '$(PROTO_TOOLS)'
	@touch $@

# $(call generate,FOLDER): compile the contract into FOLDER.
generate = $(PROTO_VENV)/bin/python -m grpc_tools.protoc -I proto \
	--python_out="$(1)" --pyi_out="$(1)" --grpc_python_out="$(1)" $(PROTO_FILES)

clean: ## Remove the environments, built kernels and caches
	rm -rf $(VENV) $(PROTO_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf clients/node/node_modules clients/node/dist clients/node/src/generated
	find model server clients proto loadtest tests -name __pycache__ -type d -prune -exec rm -rf {} +
	find model -name '*.so' -delete
