import pytest

from megatron_magistral.rollout.loads import Loads
from tests.rollout.test_clocks import Time


def test_the_engine_with_the_fewest_requests_is_the_least_loaded() -> None:
    loads = Loads()
    loads.add("a")
    loads.add("b")
    with loads.one_more("a"):
        assert loads.least(["a", "b"]) == "b"
        with loads.one_more("b"), loads.one_more("b"):
            assert loads.least(["a", "b"]) == "a"


def test_an_engine_is_idle_while_it_has_no_request() -> None:
    time = Time()
    loads = Loads(time)
    loads.add("a")
    loads.add("b")
    with loads.one_more("a"):
        time.now_s = 3.0
        with loads.one_more("a"):  # more requests are not less idle
            time.now_s = 4.0
    time.now_s = 5.0
    found = loads.drain()
    assert found["generator_idle"] == pytest.approx((1 / 5 + 1) / 2)
    assert found["generator_idle_max"] == 1.0


def test_a_request_that_fails_has_ended() -> None:
    loads = Loads()
    loads.add("a")
    loads.add("b")
    with pytest.raises(OSError), loads.one_more("a"):
        raise OSError
    with loads.one_more("b"):
        assert loads.least(["a", "b"]) == "a"


def test_requests_of_an_engine_that_has_left_may_still_end() -> None:
    loads = Loads()
    loads.add("a")
    with loads.one_more("a"):
        loads.drop("a")
    assert loads.drain() == {}
