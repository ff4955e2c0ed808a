# All commands for developers. Each creates the environment in .venv first, if it is missing or if pyproject.toml
# or constraints.txt have changed.

BIN := .venv/bin

.PHONY: help demo soak simulate crashstates planted mutants test test-slow bench lint format docs fuzz audit venv deb image requirements release clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile | expand -t 12

demo: venv ## the full path with real input: devices, streams, S3, Spark table
	@.ci/tools java
	$(BIN)/python examples/demo/run.py

soak: venv ## everything at once under faults, MINUTES=20; the report is build/soak/soak.md
	@.ci/tools java mosquitto
	$(BIN)/python -m benchmarks.soak --minutes $(or $(MINUTES),20)

test: venv lint ## the checks for every commit; in CI also a share of the slow tests, another each day
	@.ci/tools java mosquitto strace systemd nspawn chromium node nginx
	$(BIN)/python -m pytest -m "not slow" --numprocesses 3 --dist loadfile
	$(if $(CI),@.ci/tools lintian mmdebstrap podman compose qemu)
	$(if $(CI),-$(BIN)/python -m tests.mutants --changed --sample 20 --jobs 2 --minutes 3 --seconds 12)
	$(if $(CI),$(BIN)/python -m pytest -m slow --share $(or $(SHARE),$(shell expr $$(date +%s) / 86400)))

test-slow: venv ## the tests that take minutes; SHARE=1 runs only the first share
	@.ci/tools java mosquitto strace systemd nspawn lintian mmdebstrap podman compose qemu
	$(BIN)/python -m pytest -m slow $(if $(SHARE),--share $(SHARE))

simulate: venv ## the whole product on a simulated machine, new worlds each time: MINUTES=1, SEED=
	$(BIN)/python -m tests.simulation --minutes $(or $(MINUTES),1) $(if $(SEED),--seed $(SEED))

crashstates: venv ## what a power cut may leave of real runs, each state started: STATES=800 of each kind, SEED=
	@.ci/tools strace
	$(BIN)/python -m tests.crashstates --states $(or $(STATES),800) $(if $(SEED),--seed $(SEED))

planted: venv ## plants 89 defects, and notes what finds each (hours): ONLY=words of one, JOBS=1
	@.ci/tools java mosquitto
	$(BIN)/python -m tests.planted --jobs $(or $(JOBS),1) $(if $(ONLY),--only "$(ONLY)")

mutants: venv ## changes the code by chance, prints what no test sees: ONLY=bridge/streams, SAMPLE=50, SEED=, JOBS=1
	@.ci/tools java mosquitto
	$(BIN)/python -m tests.mutants --jobs $(or $(JOBS),1) --sample $(or $(SAMPLE),50) \
	  $(if $(ONLY),--only $(ONLY)) $(if $(SEED),--seed $(SEED))

bench: venv ## all benchmarks with their peers, and benchmarks/results.md from them (two hours)
	@.ci/tools java mosquitto redis rabbitmq
	$(BIN)/python -m benchmarks

test-spark: venv ## the Spark job on every supported version, by spark-submit and Spark Connect
	@.ci/tools java
	$(BIN)/python -m pytest tests/ingest/test_versions.py -m slow

lint: venv ## formatting, style, types, imports
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv ## fix the formatting
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: venv ## the documentation, in build/docs; regenerates the generated pages
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --strict

fuzz: venv ## hostile input with new seeds each time, MINUTES=10
	.ci/fuzz $(BIN)/python $(or $(MINUTES),10)

audit: venv ## known vulnerabilities, and the SBOM dist/streambridge.cdx.json
	.ci/audit $(BIN)/python

venv: .venv/made ## only the environment

.venv/made: pyproject.toml constraints.txt
	@.ci/tools python
	rm -rf .venv
	$$(.ci/python) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[amqtt,spark,parquet,dev,docs]'
	@touch $@

deb: ## a Debian package of the gateway, in dist/: ARCH=arm64 or amd64
	.ci/deb dist $(ARCH)

image: ## an OCI image of the gateway, in dist/: ARCH=arm64 or amd64
	@.ci/tools mmdebstrap
	.ci/image dist $(ARCH)

requirements: ## requirements/*.txt from constraints.txt, with hashes
	.ci/requirements

release: venv ## all packages of the tagged commit, checked, in dist/: URL=repository KEY=SSH key that signs
	@.ci/tools mmdebstrap lintian
	$(BIN)/python .ci/release.py $(if $(URL),--url $(URL)) $(if $(KEY),--key $(KEY))

clean: ## remove everything that these commands have created
	rm -rf .venv .sdks build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
