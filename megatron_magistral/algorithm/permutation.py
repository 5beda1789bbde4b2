"""The preset permutation: which data-parallel rank trains which completion (section 3).

The place of a completion in its minibatch decides its rank, by a permutation that is fixed before
anything is generated. Neither length nor reward nor speed has a say, so no rank collects the short
completions, and every rank gets the same number.
"""

from __future__ import annotations

import random


def preset_ranks(step: int, num_sequences: int, num_ranks: int, seed: int) -> tuple[int, ...]:
    """The rank of each of the `num_sequences` places of optimizer step `step`.

    Raises ValueError if the places cannot be dealt out evenly.
    """
    if num_ranks < 1 or num_sequences % num_ranks != 0:
        raise ValueError(
            f"{num_sequences} sequences per minibatch over {num_ranks} data-parallel ranks: "
            "the number of sequences must be a multiple of the number of ranks"
        )
    ranks = [place % num_ranks for place in range(num_sequences)]
    random.Random(f"{seed}/{step}").shuffle(ranks)  # a string seed is hashed the same everywhere
    return tuple(ranks)
