# make setup    set up .venv. PyTorch's build is CUDA's where there are GPUs; TORCH=cpu or TORCH=cuda says otherwise,
#               and TORCH=here takes the PyTorch of the environment that is active
# make bench    set up, run the default benchmark, print its table (ARGS="..." hands more to snakemake)
# make quick    set up, and have a first look: few rows, a small model, in results/quick
# make again    repeat the blocks in which a run was disturbed
# make test     set up, run the tests in two processes (MARKED= all of them, also the slow ones; WORKERS=0 in one, as
#               a debugger wants it, with LIMIT=0, or a test ends after half an hour; ARGS="..." hands more to pytest)
# make test-slow  the tests that take longer: every strategy's proof, and every mistake it must catch
# make horovod  build and install Horovod; set-up has tried it, this fails where it can't be built
# make docs     write docs/strategies.md from the strategies' files, and the tables of keys, of columns and of records
# make pictures picture the report of a quiet `make bench` (docs/report.png, report.zh.png), and record a terminal (docs/terminal.md);
#               needs Chromium and tmux
# make site     build the guide, in English and Chinese, into site/ (installs requirements-docs.txt)
# make lint     ruff, snakefmt, snakemake --lint, hadolint
# make images   build the Docker images for this machine's CPUs (VARIANT=cuda: for NVIDIA GPUs); see docker/build.sh
# make sif      turn them into .sif files, for snakemake --cores all --use-singularity
# make locks    write docker/locks/ again, after a change of the requirements
# make benchmark  measure Lockstep against what a user would otherwise write, into docs/performance.md
# make claims   measure what public articles say of training strategies, into docs/claims.md
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?=
built = $(file < $(VENV)/.complete)
CORES ?= all
MARKED ?= not slow
WORKERS ?= 2
LIMIT ?= 1800
ARGS ?=

.PHONY: setup other-build bench quick again test test-slow horovod docs pictures site lint benchmark claims images sif locks clean

setup: $(VENV)/.complete $(BIN)/lockstep
	@case "$(TORCH) $$(cat $<) $$(setup/which_torch.sh)" in " cpu cuda"*) \
	  echo "note: there are GPUs here, and $(VENV) has PyTorch's cpu build: make setup TORCH=cuda" >&2 ;; esac

# It says which of PyTorch's builds is installed; where TORCH names the other one, set-up is done again.
$(VENV)/.complete: requirements.txt requirements-dev.txt constraints.txt \
  $(if $(filter-out $(built),$(TORCH)),other-build)
	@setup/check.sh $(PYTHON) $(VENV) "$(or $(TORCH),$(filter here,$(built)))"
	@setup/install.sh $(PYTHON) $(VENV) "$(or $(TORCH),$(filter here,$(built)))"

# The name to type, once the environment is activated.
$(BIN)/lockstep: setup/command.sh $(VENV)/.complete
	@setup/command.sh $(VENV)

bench: setup
	@$(BIN)/python workflow/scripts/command.py bench --cores $(CORES) $(ARGS)

quick: setup
	@$(BIN)/python workflow/scripts/command.py quick --cores $(CORES) $(ARGS)

again: setup
	$(BIN)/python workflow/scripts/again.py --cores $(CORES)

test: setup
	$(BIN)/python -m pytest -m "$(MARKED)" --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder \
	  --timeout $(LIMIT) $(ARGS)

test-slow: MARKED = slow
test-slow: test

horovod: setup
	docker/build-horovod.sh $(BIN)/python

docs: setup
	PYTHONPATH=workflow/scripts $(BIN)/python docs/strategies.py
	PYTHONPATH=workflow/scripts $(BIN)/python docs/configuration.py
	PYTHONPATH=workflow/scripts $(BIN)/python docs/columns.py
	PYTHONPATH=workflow/scripts $(BIN)/python docs/records.py

pictures: setup
	$(BIN)/python docs/picture_report.py
	$(BIN)/python docs/record_terminal.py

site: setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements-docs.txt
	@$(BIN)/python docs/build_site.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow/rules
	$(BIN)/snakemake --lint
	$(BIN)/hadolint docker/Dockerfile

benchmark: setup
	$(BIN)/python -m benchmarks --write

claims: setup
	$(BIN)/python -m claims --write

images:
	docker/build.sh

sif:
	docker/sif.sh

locks:
	docker/lock.sh

clean:
	rm -rf results site .snakemake
	[ ! -f .env ] || mkdir results .snakemake # which Compose mounts
