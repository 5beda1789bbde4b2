import pytest

from megatron_magistral.data.tiny_world import Side, make_exercises

NUM_TRAIN = 800
NUM_HELD_OUT = 200


@pytest.fixture(scope="session")
def train_exercises():
    return make_exercises(0, Side.TRAIN, NUM_TRAIN)


@pytest.fixture(scope="session")
def held_out_exercises():
    return make_exercises(0, Side.HELD_OUT, NUM_HELD_OUT)


@pytest.fixture(scope="session")
def exercises(train_exercises, held_out_exercises):
    return train_exercises + held_out_exercises
