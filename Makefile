# Everything sets itself up in .venv: Python, a C++ compiler and pip's registry are all that is needed.
PYTHON ?= python3
# what pip is asked for; for example TORCH="torch==2.10.* torchvision"
TORCH ?= torch torchvision
BIN := .venv/bin
WITH_PATH := PATH="$(CURDIR)/$(BIN):$$PATH"
SOURCES := $(shell find csrc -type f) setup.py pyproject.toml
# Hundreds of processes read the same modules: their bytecode is kept, or each would compile them again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-deep test-long lint hooks build docs tutorials portability wheels ranks sharded flower flower-deploy lora gpu gpu-build gpu-tests gpu-runs gpu-sanitize gpu-bench attack trust mutants bench clean

# torch comes first: the kernels are built against the torch that is there; ninja, on the path, compiles files side by side
.venv/tools: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip setuptools wheel pybind11 ninja
	$(BIN)/pip install --quiet $(TORCH) numpy safetensors annotated-types
	touch $@

.venv/ready: .venv/tools $(SOURCES)
	$(WITH_PATH) $(BIN)/pip install --quiet --no-build-isolation --config-settings editable_mode=compat -e ".[cli,data,vision,plot,test]"
	$(BIN)/python -m pflcore info
	touch $@

build: .venv/ready

# the four systems on real data in three minutes: tables and pictures on one page, runs/demo/index.html
demo: build
	$(BIN)/python examples/demo.py

# every property at small size, in minutes; ORDER=--randomly-seed=N shuffles the tests
ORDER ?= -p no:randomly
PROCESSES ?= auto
PYTEST = $(BIN)/python -m pytest -n $(PROCESSES) --maxprocesses 8 --dist loadgroup --durations 10 --no-idle-skips $(ORDER)
test: build
	$(PYTEST)

# more sizes and algorithms, every instruction set, compilers, wheels, several processes
test-deep: build
	$(PYTEST) --suite deep

# every algorithm under every law, and what takes minutes: sanitizers, every CUDA kernel on the CPU, notebooks, other people's runtimes, containers
test-long: build
	$(PYTEST) --suite long

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# ruff, mypy and clang-format before each commit, on the files that it changes; `pre-commit run --all-files` looks at all of them
hooks: build
	$(BIN)/pip install --quiet pre-commit
	$(BIN)/pre-commit install

# the kernels against the oldest torch and the newest, on every Python that is here: gigabytes of downloads
portability:
	.ci/portability

# the site of the documents, in site/; a link or name that leads nowhere is an error
docs: build
	$(BIN)/pip install --quiet mkdocs-material "mkdocstrings[python]" ruff
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# executes the notebooks of docs/tutorials, and stores what they print and draw, in some three minutes
tutorials: build
	$(BIN)/pip install --quiet nbclient ipykernel pandas
	$(BIN)/python docs/make_tutorials.py

# wheels of the CPU kernels for x86-64 and aarch64, each for every Python and every torch >= 2.10, and tries of them: gigabytes of downloads
wheels: build
	.ci/wheels

# one run on one, two and three processes, which give the same models
ranks: build
	$(BIN)/python examples/ranks.py

# a personalized server step over two processes, held to one process
sharded: build
	$(BIN)/torchrun --standalone --nproc-per-node=2 examples/sharded.py

# everything that needs a GPU, in steps of minutes (docs/gpu.md): the kernels, their tests there, simulations against the CPU's, compute-sanitizer,
# and the kernels beside torch and the card's limits; output in LOGS. GPU_PYTHON=python3 takes a Python that has torch and pytest as it is, and its
# CUDA compiler: no .venv, and pip is asked for nothing
GPU_PYTHON ?= $(BIN)/python
LOGS ?= build/gpu
gpu gpu-build gpu-tests gpu-runs gpu-sanitize gpu-bench: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),build)
	LOGS="$(LOGS)" .ci/gpu $(GPU_PYTHON) $(patsubst gpu-%,%,$(filter gpu-%,$@))

# attacks on FedAvg's and WAFFLe's uploads in a minute or two; `pflcore attack` does it on Fashion-MNIST with 1,000 samples a client
attack: build
	$(BIN)/pflcore attack --data mnist5k --clients 2 --samples 200 --rounds 5 --shadows 2 --ratios 4 --steps 500 --out runs/attack

# the packages of an extra, without building pflcore again
EXTRA = import sys; from importlib.metadata import requires; print(*(r.split(";")[0] for r in requires("pflcore") if f"extra == \"{sys.argv[1]}\"" in r), sep="\n")
extra = $(BIN)/python -c '$(EXTRA)' $(1) | $(BIN)/pip install --quiet -r /dev/stdin

# twelve clients' adapters of a tiny transformer: raw factors, and products, as neighbours
lora: build
	$(call extra,lora)
	$(BIN)/python examples/lora.py

# personalized training as a Flower app, eight nodes on two cores, in half a minute; what it starts on 127.0.0.1 goes on afterwards
flower: build
	$(call extra,flower)
	$(WITH_PATH) FLWR_TELEMETRY_ENABLED=0 RAY_USAGE_STATS_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 $(BIN)/flwr run examples/flower \
	  --stream --federation-config "num-supernodes=8 client-resources-num-cpus=1 init-args-num-cpus=2"

# the same app on a SuperLink and two SuperNodes, each a process of its own on 127.0.0.1, in a minute or two; its server is killed once and goes on,
# the models are compared with a simulation's, and every process that it started ends
flower-deploy: build
	$(call extra,flower)
	$(BIN)/python examples/flower_deploy.py --kill

# what tries to break it on purpose, and figures: mutants of the code, bad inputs, altered data, hostile clients, sanitizers, what is never lost
trust: build
	$(BIN)/python tests/trust.py

# sixty small changes of the code that a library draws, each tried with the tests that reach its line, in half an hour
mutants: build
	$(BIN)/python tests/mutants.py

bench: build
	$(BIN)/python -m bench

clean:
	rm -rf .venv build dist pflcore/*.so
