# Everything a newcomer needs: `make demo`, `make test`. Python 3.11 or newer and make are enough to start.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NSQJS := tests/conformance/nsqjs
FIND_CHROMIUM := for name in $$NSPARQ_TEST_CHROMIUM chromium-headless-shell chromium chromium-browser google-chrome; do command -v $$name && break; done >/dev/null
# What tests need besides Python packages.
PROGRAMS := $(addprefix $(VENV)/.,nsqjs chromium shells prometheus coordinators)
BENCH_ARGS ?=
DEMO_ARGS ?=
UP_ARGS ?=
# Many tests wait more than they compute: this many at a time keep two cores busy.
PARALLEL := -n 6 --dist loadfile --no-loadscope-reorder
# What shares a Spark session is run beside all that, by one process: a second session would have to start and to warm
# up as well.
SPARK_TESTS := tests/spark tests/pipeline
# Other versions of Spark than the pinned one, for `make test-spark-versions`: the newest of each that we support.
SPARK_VERSIONS := 4.1.4 4.2.1
VERSION_TESTS := tests/spark/test_versions.py
# Spark 4.1 drops sockets without closing them.
VERSION_WARNINGS := -W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning
# The interpreters of `make test-wheel`: those that we support. One that is missing is left out at a desk.
WHEEL_PYTHONS := python3.11 python3.12 python3.13
# Run a second time without the compiled kernel: what passes through it and does not itself try both builds. The kernel
# does one thing for the broker: it builds the frames of the messages that a channel sends. So the broker's files named
# here are those about what a channel sends: for the first time and again, from the log, from memory and after a restart.
# Costs, clocks, settings, damage and the like are the same in both builds.
PURE_TESTS := $(addprefix tests/broker/test_,channel.py cold_reads.py deferred.py ephemeral.py restart.py topic.py) \
  tests/test_kernel.py tests/conformance/test_e_delivery.py tests/conformance/test_h_publish.py

# The tests start hundreds of Python processes, which must not compile everything anew, whatever is set here otherwise.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help venv demo up test check compiled pytest pytest-spark pytest-rest pytest-pure test-spark-versions test-wheel dist release bench docs docs-site fmt clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    a million events through the whole stack and Spark, checked and shown (DEMO_ARGS='--events=100000')"
	@echo "make up      leave the stack running to look at, with events trickling in, until Ctrl-C"
	@echo "make test    check, then the whole test suite"
	@echo "make test-spark-versions   the connector with older versions of Spark (SPARK_VERSIONS='4.2.1'; 450 MB each)"
	@echo "make test-wheel   the pages followed word by word, in clean environments (WHEEL_PYTHONS='python3.12')"
	@echo "make check   lint, format and types, without running anything"
	@echo "make bench   the load benchmark (BENCH_ARGS='--peer HOST:PORT' to compare)"
	@echo "make docs    rewrite the generated reference pages"
	@echo "make docs-site   build the documentation as a site, in build/site"
	@echo "make dist    a wheel in dist/, to install on other machines"
	@echo "make release VERSION=0.2.0   set the version, and move the notes of changes/ to CHANGELOG.md"
	@echo "make fmt     format the code"
	@echo "make clean   remove everything that make built"

venv: $(VENV)/.installed

demo: venv
	$(BIN)/python -m nsparq.demo $(DEMO_ARGS)

up: venv
	$(BIN)/python -m nsparq.demo up $(UP_ARGS)

# While one core makes the archive of classes, the other checks the types, compiles the test modules (each worker would
# do that for itself otherwise; what is wrong with them the tests will say) and runs the tests of the pure build.
test: venv
	@$(MAKE) --no-print-directory -j2 $(VENV)/.spark-classes.jsa check compiled $(PROGRAMS) \
	  $(if $(PYTEST_ARGS),,pytest-pure)
	@$(MAKE) --no-print-directory pytest

compiled: venv
	@$(BIN)/python -m pytest -q --collect-only $(PYTEST_ARGS) > /dev/null 2>&1 || true

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

pytest: venv $(PROGRAMS) $(VENV)/.spark-classes.jsa
ifeq ($(PYTEST_ARGS),)
	@$(MAKE) --no-print-directory --keep-going --output-sync=line -j2 pytest-spark pytest-rest
else
	$(BIN)/python -m pytest $(PYTEST_ARGS)
endif

pytest-spark:
	$(BIN)/python -m pytest -q -m spark_session $(SPARK_TESTS)

# Spark's tests are one process. It has the higher priority, so that it is not left alone at the end.
pytest-rest:
	nice -n 2 $(BIN)/python -m pytest -q $(PARALLEL) -m 'not spark_session'

pytest-pure:
	NSPARQ_NO_EXTENSIONS=1 $(BIN)/python -m pytest -q $(PURE_TESTS)

# Only PySpark itself is another: it is found before the one of the virtual environment, by the workers too.
test-spark-versions: $(SPARK_VERSIONS:%=$(VENV)/spark-%/.installed)
	@for version in $(SPARK_VERSIONS); do echo "Spark $$version"; \
	  PYTHONPATH=$(abspath $(VENV))/spark-$$version $(BIN)/python -m pytest -q $(VERSION_WARNINGS) $(VERSION_TESTS) || exit 1; done

$(VENV)/spark-%/.installed: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-deps --no-compile --upgrade --target $(@D) pyspark==$*
	@touch $@

# A wheel for each interpreter, with and without a C compiler: built, installed into a new virtual environment, and
# used as README and the tutorials say.
test-wheel: venv
	@for python in $(WHEEL_PYTHONS); do \
	  $$python --version 2> /dev/null || { echo "$$python is missing"; test "$$CI" != true || exit 1; continue; }; \
	  $(BIN)/python -m tests.release.follow --python $$python || exit 1; \
	  $(BIN)/python -m tests.release.follow --python $$python --without-compiler README.md docs/tutorial.md || exit 1; \
	done

dist: venv
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

release:
	$(PYTHON) changes/release.py $(VERSION)

bench: venv
	$(BIN)/python -m benchmarks.macro.broker $(BENCH_ARGS)

docs: venv
	$(BIN)/python -m nsparq.options --markdown > docs/reference/nsqd-options.md
	$(BIN)/python -m nsparq.options --toml > docs/reference/nsqd.example.toml
	$(BIN)/python -m nsparq.server.api.table --markdown > docs/reference/nsqd-http.md
	$(BIN)/python -m nsparq.lookup.options --markdown > docs/reference/nsqlookupd-options.md
	$(BIN)/python -m nsparq.lookup.options --toml > docs/reference/nsqlookupd.example.toml
	$(BIN)/python -m nsparq.lookup.http_api --markdown > docs/reference/nsqlookupd-http.md
	$(BIN)/python -m nsparq.admin.options --markdown > docs/reference/nsqadmin-options.md
	$(BIN)/python -m nsparq.admin.options --toml > docs/reference/nsqadmin.example.toml
	$(BIN)/python -m nsparq.admin.show.api.reference --markdown > docs/reference/nsqadmin-http.md
	$(BIN)/python -m nsparq.tools.reference --markdown > docs/reference/tools.md
	$(BIN)/python -m nsparq.spark.options --markdown > docs/reference/spark-options.md
	$(BIN)/python -m nsparq.pipeline.file.reference --markdown > docs/reference/pipeline-file.md

docs-site: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "build/site is ready: python3 -m http.server -d build/site 8000"

fmt: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist demo-results .hypothesis .mypy_cache .pytest_cache .ruff_cache $(NSQJS)/node_modules
	rm -f src/nsparq/_kernel.*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps say that a step is done for the present state of the files it depends on.
# The build tools are installed first, so that they too come in the pinned version.
$(VENV)/.installed: pyproject.toml setup.py constraints.txt src/nsparq/_kernel.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "nsparq needs Python 3.11 or newer, and '$(PYTHON)' is not: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || .ci/install-packages python3-venv
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt setuptools
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --no-build-isolation --editable '.[all,test,docs]'
	@touch $@

# Without npm the nsqjs tests are skipped at a desk; on the build server that is a failure.
$(VENV)/.nsqjs: $(VENV)/.installed $(wildcard $(NSQJS)/package.json $(NSQJS)/package-lock.json)
ifneq ($(wildcard $(NSQJS)/package.json),)
	@command -v npm >/dev/null || .ci/install-packages nodejs npm || test "$$CI" != true
	@if command -v npm >/dev/null; then cd $(NSQJS) && npm ci --no-audit --no-fund && touch $(abspath $@); fi
endif

# The JVMs of the tests start much faster with it: it takes 44 processor seconds and saves 80.
$(VENV)/.spark-classes.jsa: $(VENV)/.installed
	@$(BIN)/python -m tests.support.spark_classes 2> /dev/null || true

# The same as for npm holds for Chromium, which the browser tests drive. The one without windows takes less
# processor time. Where it cannot be installed, the tests drive whichever is there.
$(VENV)/.chromium: $(VENV)/.installed
	@command -v chromium-headless-shell >/dev/null || .ci/install-packages chromium-headless-shell fonts-dejavu-core \
	  || $(FIND_CHROMIUM) || .ci/install-packages chromium fonts-dejavu-core || test "$$CI" != true
	@if $(FIND_CHROMIUM); then touch $@; fi

# And for the shells whose completion is tested. One package after the other: apt has a lock.
$(VENV)/.shells: $(VENV)/.installed | $(VENV)/.chromium
	@command -v zsh >/dev/null && command -v fish >/dev/null || .ci/install-packages zsh fish || test "$$CI" != true
	@if command -v zsh >/dev/null && command -v fish >/dev/null; then touch $@; fi

# And for Prometheus with promtool. Only the programs: an installed package would start the service.
$(VENV)/.prometheus: $(VENV)/.installed | $(VENV)/.shells
	@command -v promtool >/dev/null || .ci/unpack-package prometheus $(abspath $(VENV))/prometheus && touch $@ \
	  || test "$$CI" != true

# And for the coordinators of replication: etcd, the program alone, and PostgreSQL; ip joins the machines of a cluster.
$(VENV)/.coordinators: $(VENV)/.installed | $(VENV)/.prometheus
	@command -v etcd >/dev/null || .ci/unpack-package etcd-server $(abspath $(VENV))/etcd || test "$$CI" != true
	@ls -d /usr/lib/postgresql/*/bin >/dev/null 2>&1 || .ci/install-packages postgresql || test "$$CI" != true
	@command -v ip >/dev/null || .ci/install-packages iproute2 || test "$$CI" != true
	@touch $@
