import threading
from types import SimpleNamespace

import pytest

from pt2mx.patches.replaced import replaced


def test_the_attribute_is_back_after_all_threads():
    """Also after an error, and after a thread that waited for the first one."""
    owner, inside, leave = SimpleNamespace(number=1), threading.Event(), threading.Event()

    def other_thread():
        with replaced(owner, "number", lambda number: number + 10):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other_thread)
    with pytest.raises(ZeroDivisionError), replaced(owner, "number", lambda number: number + 1):
        thread.start()
        assert not inside.wait(0.2) and owner.number == 2
        raise ZeroDivisionError
    inside.wait()
    assert owner.number == 11
    leave.set()
    thread.join()
    assert owner.number == 1


def test_contexts_nest():
    owner = SimpleNamespace(number=1)
    with replaced(owner, "number", lambda number: number + 1):
        with replaced(owner, "number", lambda number: number * 10):
            assert owner.number == 20
        assert owner.number == 2
    assert owner.number == 1


def test_a_library_without_the_attribute_is_left_alone():
    owner = SimpleNamespace()
    with replaced(owner, "number", lambda number: 1):
        assert not hasattr(owner, "number")
