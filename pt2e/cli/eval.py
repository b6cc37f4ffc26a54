"""The command `pt2mx eval`: evaluate a language model on tasks of EleutherAI's lm-eval."""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import sys
from contextlib import redirect_stdout

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.programs import load_folder
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.files.output import json_text, write_text
from pt2mx.pt2e.files.user_errors import user_errors

#: the results of lm-eval without documents and settings
_KEYS = ("results", "groups", "group_subtasks", "n-shot", "n-samples", "versions", "higher_is_better")
_OFFLINE = "offline a task needs local data: describe it in a YAML file of --include-path"


def run(options: argparse.Namespace) -> Result | None:
    lm_eval = import_extra("lm_eval", "eval")
    harness = import_extra("pt2mx.pt2e.language.harness", "eval")
    with Progress(3, "find the tasks") as progress:
        manager = import_extra("lm_eval.tasks", "eval").TaskManager(include_path=options.include_path)
        tasks = _tasks(options.tasks, manager.all_tasks)
        progress.begin("load")
        loaded = load_folder(options.folder, options.device)
        with user_errors(f"load {options.folder!r}"):
            model = harness.HarnessModel(loaded, options.batch_size, options.max_length)
        progress.begin("evaluate")
        with redirect_stdout(sys.stderr), user_errors(f"evaluate {', '.join(options.tasks)}", _OFFLINE):
            results = lm_eval.simple_evaluate(
                model=model,
                tasks=tasks,
                num_fewshot=options.fewshot,
                limit=options.limit,
                log_samples=False,
                apply_chat_template=options.chat,
                fewshot_as_multiturn=options.chat,
                task_manager=manager,
            )
    if results is None:  # another rank of torchrun has them
        return None
    data = {"model": options.folder, "lm_eval": lm_eval.__version__, **{key: results.get(key) for key in _KEYS}}
    write_text(json_text(data), options.output)
    table = import_extra("lm_eval.utils", "eval").make_table
    tables = [table(results, column) for column in ("results", "groups") if results.get(column)]
    return Result("\n".join([*tables, progress.seconds()]), {**data, "seconds": progress.times()})


def _tasks(names: list[str], known: list[str]) -> list[str]:
    """Return the tasks that names and patterns match, each once; raise an `MXError` for a name that matches none."""
    tasks = []
    for name in names:
        matches = fnmatch.filter(known, name)
        if not matches:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise MXError(f"unknown task {name!r}: {hint}`lm-eval ls tasks` lists all, --include-path adds your own")
        tasks += matches
    return list(dict.fromkeys(tasks))
