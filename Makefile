# make serve | test | demo | check | bench NAME=ttft | clean
PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check --constraint constraints.txt
INSTALLED := .venv/.installed
TOOLS := .venv/.tools
KERNELS := rewake/backends/torch/kernels

.PHONY: install serve demo test test-native lint check bench clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml setup.py constraints.txt $(wildcard $(KERNELS)/*.cpp $(KERNELS)/*.h)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; name it: make PYTHON=python3.12 ..."; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable .
	touch $@

# what only tests, checks and benches need, a browser's driver among it; rewake itself is there already, and stays as it is
$(TOOLS): $(INSTALLED)
	$(PIP) 'rewake[dev]'
	touch $@

serve: install
	$(PY) -m rewake serve $(ARGS)

demo: install
	$(PY) examples/demo.py

# two processes, each file in one of them; where they outnumber the cores, threads that wait should not spin
test: $(TOOLS)
	OMP_WAIT_POLICY=passive $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-native:
	mkdir -p build
	$(CXX) -std=c++17 -pthread -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -ffp-contract=off -Wno-psabi \
		-I $(KERNELS) tests/kernels/native_test.cpp -o build/native_test
	build/native_test

lint: $(TOOLS)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

check: lint test

bench: $(TOOLS)
	$(PY) -m bench.$(NAME) $(ARGS)

clean:
	rm -rf .venv build *.egg-info
