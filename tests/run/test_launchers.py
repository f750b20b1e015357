"""What starts and watches a run imports neither PyTorch nor a framework: that took longer than some trainings.

Nor does a strategy import a framework that it does not use.
"""

import subprocess
import sys

import pytest

from lockstep.config import reading
from lockstep.run import node
from lockstep.run.addresses import Rendezvous
from tests.conftest import PROJECT

FRAMEWORKS = {"deepspeed", "lightning_fabric", "horovod", "peft", "bitsandbytes", "matplotlib", "sklearn"}


def imported(code: str) -> set[str]:
    """All modules that are there after `code` ran."""
    folder = PROJECT / "workflow" / "scripts"
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*(name for name in sys.modules if sys.modules[name]))"]
    return set(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.split())


def test_starting_a_run_imports_nothing_heavy():
    heavy = FRAMEWORKS | {"torch", "transformers", "accelerate"}
    assert heavy & imported("from lockstep.config import launchers; from lockstep.run import runs") == set()


@pytest.mark.parametrize(
    ("strategy", "more"),
    [("single", {"datasets", "pandas", "jsonschema"}), ("recipe", {"datasets"}), ("trainer", set())],
)
def test_a_strategy_imports_no_framework_that_it_does_not_use(strategy, more):
    code = (
        "from lockstep.model import models; from lockstep.rank import main;"
        f" from lockstep.strategies import {strategy}; models.keep_masks()"
    )
    modules = imported(code)
    assert "torch" in modules
    assert (FRAMEWORKS | more) & modules == set()


# What Open MPI 4.1 and 5.0, MPICH 5, the launchers of PyTorch's frameworks, and schedulers leave in a rank's
# environment; and what users configure these with.
LEFT = """
    OMPI_COMM_WORLD_LOCAL_RANK OMPI_UNIVERSE_SIZE OMPI_FILE_LOCATION OMPI_MCA_ess OMPI_MCA_ess_base_jobid
    OMPI_MCA_orte_ess_num_procs OMPI_MCA_orte_hnp_uri OMPI_MCA_orte_launch OMPI_MCA_orte_precondition_transports
    PMIX_RANK PMIX_NAMESPACE PMIX_SERVER_URI2 PMI_RANK PMI_FD MPI_LOCALRANKID MPI_LOCALNRANKS MV2_COMM_WORLD_SIZE
    RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE
    TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_RUN_ID MASTER_ADDR MASTER_PORT PET_NNODES NODE_RANK
    ACCELERATE_MIXED_PRECISION ACCELERATE_USE_FSDP FSDP_VERSION PARALLELISM_CONFIG_TP_SIZE LT_PRECISION
    HOROVOD_RANK HOROVOD_LOCAL_SIZE HOROVOD_CROSS_RANK HOROVOD_CONTROLLER HOROVOD_GLOO_RENDEZVOUS_PORT HOROVOD_ELASTIC
    CROSS_RANK CROSS_SIZE LOCAL_SIZE SLURM_NTASKS FLUX_JOB_ID LSB_JOBID JSM_NAMESPACE_RANK PBS_NODEFILE PALS_RANKID
"""
CONFIGURED = """
    OMPI_MCA_btl OMPI_MCA_rmaps_base_oversubscribe OMPI_MCA_plm_rsh_agent OMPI_MCA_orte_launch_agent
    OMPI_MCA_orte_default_hostfile OMPI_MCA_essential OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM PMIX_MCA_gds
    MV2_USE_CUDA HOROVOD_FUSION_THRESHOLD NCCL_DEBUG RANKS MY_RANK DS_ACCELERATOR http_proxy
"""


def test_a_run_gets_no_rank_size_or_job_that_another_launcher_left(monkeypatch):
    left, configured = LEFT.split(), CONFIGURED.split()
    for name in left + configured:
        monkeypatch.setenv(name, "3")
    row = reading.parse({"rows": {"x": {"strategy": "deepspeed", "device": "cpu"}}}).rows["x"]
    given = node._variables(row, Rendezvous(29400))
    assert [name for name in left if name in given] == []
    assert [name for name in configured if given.get(name) != "3"] == []
