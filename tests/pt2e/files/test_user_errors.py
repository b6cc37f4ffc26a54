import io
import logging
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from pt2mx import MXError
from pt2mx.pt2e.files.user_errors import one_line, quiet_export, user_errors

HERE = os.path.relpath(__file__)


class Net(nn.Module):
    def forward(self, x, rows):
        y = torch.relu(x)
        return y[rows] + 1  # the line of the error


def line_of(text: str) -> int:
    with open(__file__) as file:
        return next(i for i, line in enumerate(file, 1) if text in line)


def caught(function):
    with pytest.raises(Exception) as info:
        function()
    return info.value


def fail(message=""):
    raise RuntimeError(message)  # it arises here


def test_what_an_interpreter_of_graphs_adds_is_left_out():
    graph = torch.fx.symbolic_trace(nn.Linear(4, 4))
    error = caught(lambda: torch.fx.Interpreter(graph).run(torch.ones(3)))
    assert "While executing %linear" in str(error) and one_line(error).startswith("RuntimeError: ")
    assert "While executing" not in one_line(error) and "cannot be multiplied (1x3 and 4x4) (" in one_line(error)


def test_type_message_and_place():
    error = caught(lambda: fail("what it is"))
    assert one_line(error) == f"RuntimeError: what it is ({HERE}:{line_of('# it arises here')} in fail)"
    assert one_line(caught(fail)).startswith(f"RuntimeError ({HERE}:")


def test_lines_are_joined_and_long_messages_cut():
    text = one_line(ValueError("Constraints violated!\n  - Not all values\n\nSuggested fixes:\n  n = 2*m\n"))
    assert text == "ValueError: Constraints violated! - Not all values Suggested fixes: n = 2*m"
    text = one_line(ValueError("word " * 1000))
    assert len(text) < 400 and text.endswith("word ... (--traceback prints the whole)")


class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x  # a branch by values


def test_of_torch_what_is_wrong_and_where_without_its_explanations():
    text = one_line(caught(lambda: torch.export.export(Branch(), (torch.zeros(2),), strict=False)))
    assert re.match(r"GuardOnDataDependentSymNode: Could not guard on data-dependent expression Eq\(u0, 1\) \(", text)
    assert text.endswith(f"({HERE}:{line_of('# a branch by values')} in forward)") and len(text) < 250


def test_the_place_is_in_the_code_of_the_user_not_in_torch_or_python():
    for function in (
        lambda: torch.zeros(2) @ torch.zeros(3),
        lambda: torch.nn.functional.linear(torch.zeros(2), torch.zeros(3, 3)),
        lambda: subprocess.run(["/no/such/program"]),
        lambda: torch.export.export(Net(), (torch.zeros(2), 5j)),
    ):
        assert f" ({HERE}:" in one_line(caught(function))


def test_of_an_exported_graph_the_place_is_that_of_the_node():
    rows = torch.tensor([0, 1])
    model = torch.export.export(Net(), (torch.zeros(4), rows)).module()
    text = one_line(caught(lambda: model(torch.zeros(4), rows + 9)))
    assert text.startswith("IndexError: index 9 is out of bounds")
    assert text.endswith(f"({HERE}:{line_of('# the line of the error')} in forward)")


def test_a_batch_of_another_size_than_the_example():
    model = torch.export.export(nn.Linear(2, 3), (torch.zeros(4, 2),)).module()
    text = one_line(caught(lambda: model(torch.zeros(5, 2))))
    assert text.startswith("AssertionError: Guard failed: input.size()[0] == 4; sizes are those of the example: ")
    assert "export the model with dynamic_shapes for others" in text


def test_the_place_of_a_cause():
    def outer():
        try:
            fail("inner")
        except RuntimeError as error:
            raise sys_error() from error

    def sys_error():
        return ValueError("outer")

    assert one_line(caught(outer)).startswith("ValueError: outer (")
    try:
        fail("inner")
    except RuntimeError as error:
        outside = ValueError("without a place of its own")
        outside.__cause__ = error
    assert one_line(outside).endswith(f"({HERE}:{line_of('# it arises here')} in fail)")


def test_a_place_outside_the_folder_is_absolute(tmp_path, monkeypatch):
    (tmp_path / "there.py").write_text("def fail():\n    1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import there

    assert one_line(caught(there.fail)) == f"ZeroDivisionError: division by zero ({tmp_path}/there.py:2 in fail)"
    monkeypatch.chdir(tmp_path)
    assert one_line(caught(there.fail)) == "ZeroDivisionError: division by zero (there.py:2 in fail)"
    sys.modules.pop("there")


def test_a_syntax_error_says_its_place_itself():
    text = one_line(caught(lambda: compile("def f(:\n", "net.py", "exec")))
    assert text == "SyntaxError: invalid syntax (net.py, line 1)"


def test_a_stage_names_what_could_not_be_done():
    with pytest.raises(ValueError) as info, user_errors("load the model"):
        fail("why")
    assert str(info.value).startswith(f"could not load the model: RuntimeError: why ({HERE}:")
    assert isinstance(info.value.__cause__, RuntimeError)
    with pytest.raises(KeyboardInterrupt), user_errors("load the model"):
        raise KeyboardInterrupt


def test_user_errors_are_one_line():
    with pytest.raises(MXError, match=r"could not load it: KeyError: 'a' \(.*test_user_errors\.py:\d+ in test_user"):
        with user_errors("load it"):
            raise KeyError("a")
    with pytest.raises(MXError, match=r"^as it is$"), user_errors("load it"):
        raise MXError("as it is")


@pytest.fixture
def log():
    """The records of a logger of torch, as text."""
    logger, stream = logging.getLogger("torch.fx.pt2mx_test"), io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    logger.propagate = False
    yield logger, handler, stream
    logger.removeHandler(handler)


def test_it_is_told_at_the_end(log, capsys, monkeypatch):
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    logger, handler, stream = log
    with quiet_export():
        logger.warning("one")
        print("two", file=sys.stderr)
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err == "one\ntwo\n" and handler.stream is stream and not stream.getvalue()


@pytest.mark.parametrize(("asked", "told", "logged"), [(None, "", ""), ("+export", "two\n", "one\n")])
def test_a_block_that_fails_drops_it_unless_the_log_is_asked_for(asked, told, logged, log, capsys, monkeypatch):
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    if asked is not None:
        monkeypatch.setenv("TORCH_LOGS", asked)
    logger, handler, stream = log
    with pytest.raises(ValueError, match="no"), quiet_export():
        logger.error("one")
        print("two", file=sys.stderr)
        raise ValueError("no")
    assert capsys.readouterr().err == told and handler.stream is stream and stream.getvalue() == logged
