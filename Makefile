# Everything that a developer does, one word each. The environment is made on the way, in .venv, and again
# only when pyproject.toml or constraints.txt have changed.

BIN := .venv/bin

.PHONY: help demo soak test test-slow bench lint format docs fuzz audit venv deb release clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile | expand -t 12

demo: venv ## the whole way on real input: devices, streams, S3, Spark table
	@.ci/tools java
	$(BIN)/python examples/demo/run.py

soak: venv ## everything at once with everything going wrong, MINUTES=20; the report is build/soak/soak.md
	@.ci/tools java mosquitto
	$(BIN)/python -m benchmarks.soak --minutes $(or $(MINUTES),20)

test: venv lint ## what must hold before every commit; in CI also a share of the slow tests, another each day
	@.ci/tools java mosquitto strace systemd nspawn chromium node
	$(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist loadfile
	$(if $(CI),$(BIN)/python -m pytest -m slow --share $(or $(SHARE),$(shell expr $$(date +%s) / 86400)))

test-slow: venv ## the tests that take minutes; SHARE=1 only those of the first share
	@.ci/tools java mosquitto strace systemd nspawn
	$(BIN)/python -m pytest -m slow $(if $(SHARE),--share $(SHARE))

bench: venv ## every benchmark beside its peers, and docs/results.md from them (three quarters of an hour)
	@.ci/tools java mosquitto nats redis rabbitmq
	$(BIN)/python -m benchmarks

test-spark: venv ## the Spark job on every version that is promised, by spark-submit and Spark Connect
	@.ci/tools java
	$(BIN)/python -m pytest tests/ingest/test_versions.py -m slow

lint: venv ## formatting, style, types, and which room may import which
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv ## put the formatting right
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: venv ## the documentation, in build/docs; what is made from the code is made anew
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --strict

fuzz: venv ## hostile input with ever new seeds, MINUTES=10
	.ci/fuzz $(BIN)/python $(or $(MINUTES),10)

audit: venv ## known vulnerabilities, and dist/streambridge.cdx.json: what an installation consists of
	.ci/audit $(BIN)/python

venv: .venv/made ## the environment alone

.venv/made: pyproject.toml constraints.txt
	@.ci/tools python
	rm -rf .venv
	$$(.ci/python) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[amqtt,spark,parquet,dev,docs]'
	@touch $@

deb: ## a Debian package of the gateway, in dist/
	.ci/deb

release: venv ## sdist, wheel, Debian package and checksums of the tagged commit, checked, in dist/
	$(BIN)/python .ci/release.py

clean: ## remove what all of this has made
	rm -rf .venv .sdks build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
