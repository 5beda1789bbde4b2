"""What SLURM's variables say of a job."""

from __future__ import annotations

import math

import pytest

from megatron_magistral.slurm.job import JobError, duration_s, read_job

VARIABLES = {
    "SLURM_JOB_ID": "7",
    "MAGISTRAL_NODES": "n1,n2",
    "MAGISTRAL_PLACES_PER_NODE": "8",
    "MAGISTRAL_GPUS_PER_NODE": "8",
    "MAGISTRAL_TIME_LEFT": "1-00:00:00",
}


def test_a_job_is_read_from_its_environment() -> None:
    job = read_job(VARIABLES)
    assert (job.nodes, job.places_per_node, job.gpus_per_node) == (("n1", "n2"), 8, 8)
    assert job.time_left_s == 86400


def test_a_requeued_job_is_another_attempt_of_the_same_job() -> None:
    assert read_job(VARIABLES).attempt == "7.0"
    assert read_job(VARIABLES | {"SLURM_RESTART_COUNT": "2"}).attempt == "7.2"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30),
        ("2:05", 125),
        ("1:00:00", 3600),
        ("2-03:04:05", 183845),
        ("1-2", 93600),
        ("UNLIMITED", math.inf),
    ],
)
def test_times_are_read_as_slurm_writes_them(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SLURM_JOB_ID": ""}, "sbatch launch/"),
        ({"MAGISTRAL_PLACES_PER_NODE": ""}, "--ntasks-per-node"),
        ({"MAGISTRAL_PLACES_PER_NODE": "8(x2)"}, "'8(x2)': must be a whole number"),
        ({"MAGISTRAL_GPUS_PER_NODE": "4"}, "--gpus-per-node=4 and --ntasks-per-node=8"),
        ({"MAGISTRAL_TIME_LEFT": "INVALID"}, "'INVALID'"),
    ],
)
def test_a_job_that_makes_no_sense_is_one_error_that_says_what_to_change(
    variables: dict[str, str], words: str
) -> None:
    with pytest.raises(JobError) as error:
        read_job(VARIABLES | variables)
    assert words in str(error.value)
