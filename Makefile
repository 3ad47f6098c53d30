# PYTHON makes .venv; everything else runs in it.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint clean

demo: $(INSTALLED)
	$(BIN)/python demo.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2

lint: $(INSTALLED)
	$(BIN)/python -m pip install -q 'ruff>=0.12'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf .venv build dist

$(INSTALLED): pyproject.toml thunder_overlay.pth
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -e '.[demo,test]'
	touch $(INSTALLED)
