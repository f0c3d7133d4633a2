# Set-up and entry points of llm.cupy: `make` lists them. All of them may be interrupted and run again.
#
#   make train ARGS="-x 100"          more flags for the program behind a target
#   make train SCRIPT=train_llama3.py another model; bench and profile take it too
#   make test PYTHON=python3.12       another Python for a new virtual environment
#   make test PYTHON=python3 VENV=    no virtual environment: use what that Python has installed, install nothing

PYTHON = python3
VENV = .venv
ARGS =
MODEL =
SCRIPT = train_gpt2_fp32.py
NAME = $(basename $(notdir $(SCRIPT)))

# 12 or 13: the CUDA version that the NVIDIA driver supports, as CuPy's wheels are named. Empty where there is no GPU.
CUDA = $(shell nvidia-smi 2>/dev/null | \
	sed -n -e 's/.*CUDA[A-Za-z ]*Version *: *12.*/12/p' -e 's/.*CUDA[A-Za-z ]*Version *: *1[3-9].*/13/p')

# Several GPUs of a machine need NVIDIA's NCCL, which no CuPy wheel brings.
GPUS = $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
NCCL = $(if $(CUDA),$(if $(filter-out 0 1,$(GPUS)),"nvidia-nccl-cu$(CUDA)>=2.27"))

ifeq ($(VENV),)
PY = $(PYTHON)
else
PY = $(VENV)/bin/python
TRAIN_ENV = $(VENV)/.ready-to-train
TEST_ENV = $(VENV)/.ready-to-test
BOOK_ENV = $(VENV)/.ready-for-the-book
endif
PIP_INSTALL = $(PY) -m pip install --disable-pip-version-check

# Without a GPU, CuPy and NVRTC alone are enough to compile every kernel for real GPUs. There are none for macOS.
CUPY_TO_TRAIN = $(if $(CUDA),"cupy-cuda$(CUDA)x[ctk]~=14.0")
CUPY_TO_TEST = $(if $(CUDA),,"cupy-cuda13x~=14.0; $(ON_LINUX)" "nvidia-cuda-nvrtc~=13.0; $(ON_LINUX)")
ON_LINUX = sys_platform == 'linux'

.DELETE_ON_ERROR:
.PHONY: help train setup test test-all exercise bench profile book quotes sanitize compute-sanitizer lint clean

help: ## list these targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target does; do \
		printf '  make %-18s %s\n' "$$target" "$$does"; done

train: $(TRAIN_ENV) ## set up, fetch or make data, and train: GPT-2 124M on a GPU, a small model without one
	@exec $(PY) dev/make_train.py --first-run $(if $(CUDA),cuda,cpu) $(if $(MODEL),--model $(MODEL)) $(NAME).py $(ARGS)

setup: $(TEST_ENV) ## set up all that the book's pages and the tests need, and run nothing

# One process per core, which runs a file's tests one after the other; ARGS="-n 0" for a single process, which a debugger
# needs. With a GPU there is one, whose tests may need all of its memory.
ON_ALL_CORES = $(if $(CUDA),,-n auto --dist loadfile)
# Tests start more than a thousand Pythons, which would each compile our modules where no bytecode is kept.
test test-all: export PYTHONDONTWRITEBYTECODE =
test: $(TEST_ENV) ## set up and run the tests, on the CPU and, where there is one, the GPU
	$(PY) -m pytest $(ON_ALL_CORES) $(ARGS)

test-all: $(TEST_ENV) ## the same with the tests that take long, such as GPT-2 124M's ten steps: before a release
	$(PY) -m pytest $(ON_ALL_CORES) -m "long or not long" $(ARGS)

exercise: $(TRAIN_ENV) ## make or check the exercise N=3, or list them all: exercises/README.md
	@$(PY) exercises/check.py $(N)

bench: $(TEST_ENV) ## time a training step beside PyTorch's
	$(PY) dev/bench $(NAME) $(ARGS)

profile: $(TEST_ENV) ## time each kernel of a training step beside what the machine can do
	$(PY) dev/profile_step.py $(NAME) $(ARGS)

book: $(BOOK_ENV) ## make the textbook in doc/ a folder of HTML pages: book/index.html
	$(PY) doc/book.py $(ARGS)

quotes: $(TRAIN_ENV) ## write anew what the book quotes of the code: after a quoted line has changed
	$(PY) doc/quotes.py --write

# A sanitized library in a Python that is not: ASan must be loaded first. What Python leaks at exit is none of ours.
KERNEL_TESTS = $(wildcard $(patsubst kernels/%.cu,tests/test_%.py,$(wildcard kernels/*.cu))) \
	tests/test_fp8.py tests/test_fp16.py
sanitize: $(TEST_ENV) ## run the kernel tests with the kernels built for the CPU by g++ under ASan and UBSan
	CXX=g++ LLMC_CPU_SANITIZE=1 LD_PRELOAD="$$(g++ -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 \
		UBSAN_OPTIONS=print_stacktrace=1 $(PY) -m pytest $(ON_ALL_CORES) $(KERNEL_TESTS) $(ARGS)

ATTENTIONS = softmax relu flash
SANITIZED = $$($(PY) -c "from dev.scripts import model_kinds, small_model; \
	print(*(f'{kind.Config.SCRIPT}:{small_model(kind.Config)}' for kind in model_kinds()))")
CU13_BIN = $$($(PY) -c "import sysconfig; print(sysconfig.get_path('platlib'))")/nvidia/cu13/bin
compute-sanitizer: $(TRAIN_ENV) ## run a training step on the GPU under NVIDIA's four checkers, for each model and attention
	@test -f data/python_docs_val.bin || $(PY) dev/data/python_docs.py
	@PATH="$$PATH:$(CU13_BIN)"; \
	command -v compute-sanitizer >/dev/null || $(if $(VENV),$(PIP_INSTALL) "nvidia-cuda-sanitizer-api==13.0.*",false) || { \
		echo "error: compute-sanitizer is not on the PATH; it comes with NVIDIA's CUDA toolkit" >&2; exit 1; }; \
	for model in $(SANITIZED); do for attention in $(ATTENTIONS); do \
		for tool in memcheck racecheck initcheck synccheck; do \
			echo "compute-sanitizer $$tool, $${model%:*}, $$attention attention"; \
			compute-sanitizer --tool $$tool --error-exitcode 1 $(PY) $${model%:*} -e $${model#*:} --device cuda \
				-a $$attention -i data/python_docs -b 2 -t 64 -x 1 -g 8 || exit 1; \
	done; done; done

lint: $(TEST_ENV) ## check the Python code with ruff
	$(PY) -m ruff check .

clean: ## remove the virtual environment and caches, never data or models
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# After an upgrade of the system's Python, that of an environment may be gone, or look for its packages elsewhere.
BROKEN = test -e $(VENV)/.ready-to-train && { test -L $(PY) || test -e $(PY); } && ! $(PY) -c "import numpy" >/dev/null 2>&1
broken-python:
	@echo "error: the Python of $(VENV) is gone, or has no packages any more: remove $(VENV) (make clean removes .venv)," \
		"and make sets it up anew" >&2; exit 1

# PYTHON makes a new environment. One that is there keeps the Python that it has.
same-python:
	@test ! -x $(PY) || test "$$($(PY) -V)" = "$$($(PYTHON) -V 2>&1)" || { \
		echo "error: $(VENV) has $$($(PY) -V), and PYTHON=$(PYTHON) is another: remove $(VENV), or name one with VENV=" >&2; \
		exit 1; }
.PHONY: broken-python same-python

ifneq ($(VENV),)
ifeq ($(origin PYTHON),command line)
$(VENV)/.ready-to-train: | same-python
endif
$(VENV)/.ready-to-train: | $(shell $(BROKEN) && echo broken-python)
endif
# Colab's Python, and Debian's without python3-venv, cannot put a pip into an environment. One that sees their packages
# needs none. What pip installs there goes into the environment all the same.
LENT_PIP = $(PYTHON) -m venv --without-pip --system-site-packages $(VENV) && $(PY) -m pip --version >/dev/null && \
	echo "note: $(PYTHON) makes no environment with a pip: $(VENV) uses the pip and the packages of $(PYTHON)"
$(VENV)/.ready-to-train: requirements.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'error: llm.cupy needs Python 3.10 or later')"
	@$(PYTHON) -m venv $(VENV) || { $(LENT_PIP); } || { \
		echo "error: no pip for $(VENV): install venv for $(PYTHON) (Debian and Ubuntu: python3-venv)" >&2; exit 1; }
	$(PIP_INSTALL) -r requirements.txt $(CUPY_TO_TRAIN) $(NCCL)
	@touch $@

$(VENV)/.ready-to-test: $(VENV)/.ready-to-train requirements-dev.txt
	$(PIP_INSTALL) -r requirements.txt -r requirements-dev.txt $(CUPY_TO_TRAIN) $(CUPY_TO_TEST) $(NCCL)
	@touch $@

$(VENV)/.ready-for-the-book: $(VENV)/.ready-to-train
	$(PIP_INSTALL) "pypandoc_binary~=1.15"
	@touch $@
