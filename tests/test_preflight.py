"""What a run asks of the machine depends on its stages."""

from pathlib import Path

import pytest

from megatron_magistral.config_file import load
from megatron_magistral.preflight import Refused, check_machine

TINY = Path(__file__).parent.parent / "configs" / "tiny.yaml"


def test_a_machine_that_cannot_run_code_can_still_be_fine_tuned_on(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    check_machine(load(TINY, ["rl=null"]))
    with pytest.raises(Refused, match=r"g\+\+: not found"):
        check_machine(load(TINY, []))
