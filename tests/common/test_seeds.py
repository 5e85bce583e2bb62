"""Keyed random numbers: the same key, the same numbers, on every machine."""

from __future__ import annotations

import numpy as np

from tandem.common.seeds import keyed_generator, keyed_seed

SEED = 9065281077496838008
RAW = [237751489232984905, 11655636769222034702]


def test_seeds_are_the_ones_of_every_machine():
    # Written down once: a change would give every resumed run other noise.
    assert keyed_seed(0, "0-1", 3) == SEED
    assert keyed_generator(0, "0-1", 3).bit_generator.random_raw(2).tolist() == RAW


def test_parts_can_not_run_into_each_other():
    assert len({keyed_seed("ab", "c"), keyed_seed("a", "bc"), keyed_seed("abc")}) == 3


def test_a_number_and_its_digits_are_different_keys():
    assert keyed_seed(1) != keyed_seed("1")


def test_generators_of_one_key_agree_and_of_two_keys_do_not():
    one, again, other = keyed_generator("a"), keyed_generator("a"), keyed_generator("b")
    first = one.random(8)
    assert np.array_equal(first, again.random(8))
    assert not np.array_equal(first, other.random(8))
