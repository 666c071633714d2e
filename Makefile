# Every target works alone on a fresh clone: it makes .venv, installs, and does its job.
PYTHON ?= python3
PY = .venv/bin/python
READY = .venv/.ready

.PHONY: setup lint test bench demo serve profile clean

setup: $(READY)

$(READY): pyproject.toml .ci/constraints.txt .ci/install-torch
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@$(PY) -m pip install --quiet --upgrade pip
	@bash .ci/install-torch $(PY)
	@$(PY) -m pip install --quiet -c .ci/constraints.txt -e '.[test,plots]'
	@touch $(READY)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m mypy

test: $(READY)
	$(PY) -m pytest

# Command-line options go in ARGS: make serve ARGS="--model toy --port 8001"
serve: $(READY)
	$(PY) server.py $(ARGS)

demo: $(READY)
	$(PY) -m examples.demo $(ARGS)

profile: $(READY)
	$(PY) -m examples.profile $(ARGS)

bench: $(READY)
	$(PY) -m examples.bench_prefill $(ARGS)
	$(PY) -m examples.blocking $(ARGS)
	$(PY) -m examples.bench_scheduler
	$(PY) -m examples.bench_simulator

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis out
