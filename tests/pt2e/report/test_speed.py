import math

import pytest
import torch

from pt2mx.pt2e.report.speed import ROUNDS, Interval, Speed, SpeedTest, processor_name, seconds_in_turns


class Clock:
    """A clock that calls move forward, and the names of the calls in their order."""

    def __init__(self):
        self.now, self.made = 0.0, []

    def __call__(self):
        return self.now

    def call(self, name, seconds):
        def made():
            self.made.append(name)
            self.now += seconds * (1 + len(self.made) / 1000)  # the machine slows down

        return made


def test_calls_take_turns_and_short_ones_repeat():
    clock = Clock()
    rounds = seconds_in_turns({"slow": clock.call("slow", 0.12), "fast": clock.call("fast", 0.04)}, clock)
    assert clock.made == ["slow", "fast"] + ROUNDS * ["slow", "fast", "fast", "fast"]
    assert list(rounds) == ["slow", "fast"] and all(len(seconds) == ROUNDS for seconds in rounds.values())
    assert rounds["slow"][0] == pytest.approx(0.12 * 1.003) and rounds["fast"][0] == pytest.approx(0.04 * 1.005)
    assert rounds["slow"][-1] == pytest.approx(0.12 * 1.035)


def test_the_interval_leaves_out_the_lowest_and_the_highest_round():
    assert Interval.of([9.0, 1.0, 5.0, 4.0, 6.0, 3.0, 7.0, 2.0, 100.0]) == (5.0, 2.0, 9.0)
    covered = sum(math.comb(ROUNDS, k) for k in range(2, ROUNDS - 1)) / 2**ROUNDS
    assert round(covered, 2) == 0.96, "what the table says of the interval"


def speed(**seconds):
    return Speed(seconds, {}, "a processor", 2)


LOAD = [1.0, 1.1, 3.0, 1.0, 1.2, 1.0, 5.0, 1.0, 1.1]


def test_ratios_are_of_rounds_so_that_load_on_the_machine_cancels():
    actual = speed(bfloat16=LOAD, float32=[4 * s for s in LOAD], mxint8=[2 * s for s in LOAD])
    assert actual.milliseconds("mxint8") == (2200, 2000, 6000)
    assert actual.times_as_long("mxint8", "bfloat16") == (2, 2, 2)
    assert actual.verdict("mxint8") == "2.0x slower than bfloat16, 2.0x faster than float32"
    assert actual.verdict("bfloat16") == actual.verdict("float32") == actual.verdict("other") == ""


def test_what_rounds_do_not_tell_apart_is_about_as_fast():
    noisy = [0.7, 0.8, 1.3, 1.4, 1.3, 1.4, 1.3, 1.4, 1.3]
    actual = speed(bfloat16=ROUNDS * [1.0], mxint8=noisy)
    assert actual.times_as_long("mxint8", "bfloat16") == (1.3, 0.8, 1.4)
    assert actual.verdict("mxint8") == "about as fast as bfloat16"
    assert speed(float32=ROUNDS * [1.0], mxint8=ROUNDS * [1.02]).verdict("mxint8") == "about as fast as float32"


def test_the_table_and_json():
    actual = Speed({"bfloat16": ROUNDS * [0.002], "mxint8": ROUNDS * [0.003]}, {"float32": "it broke"}, "a CPU", 1)
    head, *rows, method, beside = str(actual).splitlines()
    assert head.split() == ["ms", "low", "high"]
    assert rows[0].split() == ["bfloat16", "2", "2", "2"] and rows[2].split() == ["float32", "it", "broke"]
    assert rows[1].split(maxsplit=4) == ["mxint8", "3", "3", "3", "1.5x slower than bfloat16"]
    assert method.startswith("a call: the median of 9 rounds in turns, and its 96 % interval; a CPU, 1 th")
    content = actual.to_dict()
    assert (content["processor"], content["threads"], content["method"]) == ("a CPU", 1, f"{method}\n{beside}")
    assert beside == "bfloat16 and float32: the model without quantization, compiled in the same way"
    assert "float32" not in Speed({"own": ROUNDS * [0.1]}).method, "there is no such row"
    assert content["rows"][1:] == [
        {
            "name": "mxint8",
            "milliseconds": {"median": 3.0, "low": 3.0, "high": 3.0},
            "times_as_long": {"bfloat16": {"median": 1.5, "low": 1.5, "high": 1.5}},
            "note": "1.5x slower than bfloat16",
        },
        {"name": "float32", "milliseconds": None, "times_as_long": {}, "note": "it broke"},
    ]
    assert all(map(math.isnan, actual.milliseconds("float32")))


def test_a_model_that_does_not_run_is_a_row():
    clock, test = Clock(), SpeedTest()
    test.add("works", lambda: clock.call("works", 0.1))
    test.add("does not compile", lambda: 1 / 0)
    test.add("does not run", lambda: lambda: torch.ones(2) @ torch.ones(3))
    actual = test.run(clock)
    assert list(actual.rounds) == ["works"] and clock.made == (2 + ROUNDS) * ["works"]
    assert "ZeroDivisionError" in actual.failures["does not compile"]
    assert "size" in actual.failures["does not run"]
    assert (actual.processor, actual.threads) == (processor_name(), torch.get_num_threads())
    assert torch.backends.cpu.get_cpu_capability() in actual.processor
