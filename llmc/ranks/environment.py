"""Which rank this process is, by the environment: torchrun, Slurm's srun, Open MPI's mpirun and `--gpus` (launcher.py)
each set variables of their own."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from device.errors import UserError
from llmc.ranks.heartbeat import hang_after

LAUNCHED = "LLMC_JOB"  # is set in processes that launcher.py has started


@dataclass(frozen=True)
class Place:
    """What the program that starts a process tells it: its rank among `size`, its rank on its machine, where rank 0
    listens, a word that all processes of the job know, and after how many seconds a silent rank hangs."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    job: str
    hang_after: float


def find_place(env: Mapping[str, str]) -> Place | None:
    """This process's place, by the environment, or None if it is alone. Raises UserError if the environment lacks
    something."""
    if "RANK" in env and "WORLD_SIZE" in env:  # torchrun, or launch
        rank, size, local = env["RANK"], env["WORLD_SIZE"], env.get("LOCAL_RANK", env["RANK"])
        job, address = env.get(LAUNCHED) or env.get("TORCHELASTIC_RUN_ID", ""), env.get("MASTER_ADDR")
    elif "OMPI_COMM_WORLD_RANK" in env and "OMPI_COMM_WORLD_SIZE" in env:  # before Slurm, because srun may call mpirun
        rank, size = env["OMPI_COMM_WORLD_RANK"], env["OMPI_COMM_WORLD_SIZE"]
        local = env.get("OMPI_COMM_WORLD_LOCAL_RANK", rank)
        job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
        alone = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == size
        address = env.get("MASTER_ADDR") or ("127.0.0.1" if alone else None)
    elif "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:  # srun sets the latter; a batch script lacks it
        rank, size, local = env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"], env.get("SLURM_LOCALID", "0")
        job = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
        address = env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST", ""))
    else:
        return None
    port = env.get("MASTER_PORT", 20000 + zlib.crc32(job.encode()) % 10000)
    found = f"rank {rank} of {size}, {local} on its machine, MASTER_ADDR {address}, MASTER_PORT {port}"
    try:
        rank, size, local, port = int(rank), int(size), int(local), int(port)
        (address or "").encode("idna")  # fails if it cannot be a machine's name
        if not 0 <= rank < size or not 0 < port < 65535:
            raise ValueError(found)
    except ValueError:
        raise UserError(f"the environment of this process is wrong: {found}; set it right for all ranks") from None
    if size == 1:
        return None
    if not address:
        raise UserError("MASTER_ADDR is not set: name rank 0's machine in it for all ranks (mpirun -x MASTER_ADDR=...)")
    taken = LAUNCHED not in env and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun listens there itself
    return Place(rank, size, local, address, port + taken, job, hang_after(env))


def first_host(nodes: str) -> str:
    """The first of Slurm's list of machines, "gpu[07-09,12]-ib,cpu1" for example."""
    found = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\])?([^\[,]*)", nodes)
    return found[1] + (found[2] or "") + found[3]
