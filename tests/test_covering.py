"""Covering arrays have every pair of the product, and few rows."""

from tests.covering import covering, full_product, pairs

FACTORS = {"TP": [1, 2], "PP": [1, 2, "2 + VPP 2"], "CP": [1, 2], "recompute": ["none", "full", "norms"]}


def allowed(row):
    return row["TP"] * row["CP"] < 4


def test_each_pair_that_the_product_has_is_in_a_row():
    rows = covering(FACTORS, allowed)
    assert all(map(allowed, rows))
    assert pairs(rows) == pairs(full_product(FACTORS, allowed))
    assert (("TP", 2), ("CP", 2)) not in pairs(rows)
    assert len(rows) <= 11 < len(full_product(FACTORS, allowed)) / 2


def test_the_rows_are_the_same_each_time():
    assert covering(FACTORS, allowed) == covering(dict(FACTORS), allowed)


def test_of_rows_with_equally_many_new_pairs_the_cheaper_one_is_taken():
    cheap = covering({"A": [1, 2], "B": [1, 2]}, cost=lambda row: row["A"])
    assert [row["A"] for row in cheap] == [1, 1, 2, 2]


def test_two_factors_have_all_their_rows():
    assert len(covering({"A": [1, 2, 3], "B": [4, 5]})) == 6


def test_one_row_is_enough_where_there_is_no_choice():
    assert covering({"A": [1], "B": [2], "C": [3]}) == [{"A": 1, "B": 2, "C": 3}]
