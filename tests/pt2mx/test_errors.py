from pt2mx.errors import listed


def test_of_many_names_the_first_are_listed():
    assert listed(["a", "b"]) == "a, b" and listed(list("abcdefgh")) == "a, b, c, d, e and 3 more"
