# PYTHON makes .venv; everything else runs in it.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

BENCHMARK := $(BIN)/python -m thunder.benchmarks.prologue

.PHONY: demo bench test test-all fuzz thunder-tests compat upstream-patch lint clean

# Four layers, in under three minutes; leaves prologue.png.
demo: $(INSTALLED)
	$(BENCHMARK) --layers 4 --variants none,extraction-only,fused,extraction-only+fused,floor \
		--min-run-time 0.5 --explain --plot prologue.png

# All variants at 32 layers, some twelve minutes; leaves prologue.json and prologue.png.
bench: $(INSTALLED)
	$(BENCHMARK) --layers 32 --json prologue.json --plot prologue.png

# In under ten minutes: of tests that are much alike, some (see conftest.py). test-all takes half an hour.
test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal --quick

test-all: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Searches for states in which fused and unfused prologues differ, and shows that it would notice mutants of the code;
# FUZZ='--seed 1 --variant fused' chooses. Saves what it finds as tests in fuzz-failures.
FUZZ ?= --steps 10000 --mutants
fuzz: $(INSTALLED)
	$(BIN)/python -m thunder.tests.prologue_fuzz $(FUZZ)

# The tests that ship with lightning-thunder, as they are and with transforms added to every thunder.jit. All of it takes
# hours; THUNDER_TESTS='test_core.py --every test_core.py=4' chooses a part.
thunder-tests: $(INSTALLED)
	$(BIN)/python -m pip install -q -e '.[thunder-tests]'
	$(BIN)/python scripts/thunder_tests.py $(THUNDER_TESTS)

# A quick part of the tests with the oldest and newest Python, torch and lightning-thunder; needs 10 GB of disk. COMPAT
# holds options of the script, as in COMPAT='--only 3.13 --all'.
compat: $(INSTALLED)
	$(BIN)/python scripts/compat.py --markdown $(COMPAT)

# THUNDER is a lightning-thunder source tree; the installed one without it. Leaves the patches in upstream-patch/.
upstream-patch: $(INSTALLED)
	rm -rf upstream-patch
	$(BIN)/python scripts/upstream_patch.py $(THUNDER)

lint: $(INSTALLED)
	$(BIN)/python -m pip install -q 'ruff>=0.12'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf .venv build dist

$(INSTALLED): pyproject.toml thunder_overlay.pth
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --no-compile -e '.[demo,test]'  # what is imported is compiled then
	touch $(INSTALLED)
