"""What runs inside the sandbox: confine the process, execute the program, then its tests, and report over a pipe.

Started by `sandbox.py` as `python -I child.py`; the job comes on standard input.  Every report starts with a secret of
this run, so that nothing that the program prints can pass for one.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import confine

_PLAIN = (int, float, complex, str, bytes, bool, type(None))


def main() -> None:
    job = json.loads(sys.stdin.read())
    isolated = confine.own_namespaces()
    confine.die_with_parent()
    first = os.fork()
    if first == 0:
        confine.die_with_parent()
        worker = os.fork()  # process 1 of the namespace must outlive no one, and signals to it are special
        if worker == 0:
            _work(job, isolated)
        _, status = os.waitpid(worker, 0)
        os._exit(min(os.waitstatus_to_exitcode(status) & 0xFF, 255))
    _, status = os.waitpid(first, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _work(job: dict[str, Any], isolated: bool) -> None:
    write, pipe, secret = os.write, job["report_fd"], job["secret"]

    def report(**facts: Any) -> None:
        write(pipe, f"{secret} {json.dumps(facts)}\n".encode())

    if not isolated:
        confine.block_sockets()
    confined = confine.only_files_in(os.getcwd())
    confine.drop_root(job["uid"])
    confine.limit(
        cpu_s=job["cpu_s"], memory_mib=job["memory_mib"], file_kib=job["file_kib"], processes=job["processes"]
    )
    report(event="start", own_namespaces=isolated, files_confined=confined)
    names = vars(builtins)
    untouched = dict(names)
    program: dict[str, Any] = {"__name__": "program"}
    exec(compile(job["program"], "program.py", "exec"), program)
    report(event="loaded")
    names.clear()
    names.update(untouched)  # what the program did to len or abs is undone before the tests
    if job["tests"] is not None:
        _run_tests(job["tests"], job["context"], job["entry_point"], program[job["entry_point"]], report)
    report(event="done")
    sys.stdout.flush()
    os._exit(0)


def _run_tests(
    tests: str, context: str, entry_point: str, function: Callable[..., Any], report: Callable[..., None]
) -> None:
    """Run HumanEval's `check`, each of its assertions reported by itself.

    Tests see the problem's own functions (`context`) and the one under test, not the program's other names, which could
    shadow what the tests rely on.
    """

    def candidate(*args: Any, **kwargs: Any) -> Any:
        return _plain(function(*args, **kwargs))

    tree = _Tally().visit(ast.parse(tests))
    ast.fix_missing_locations(tree)

    def tally(assertion: Callable[[], Any]) -> None:
        try:
            passed = bool(assertion())
        except Exception:
            passed = False
        report(event="assert", passed=passed)

    names: dict[str, Any] = {"__name__": "tests"}
    exec(compile(context, "context.py", "exec"), names)
    names |= {"__tally__": tally, entry_point: candidate}
    exec(compile(tree, "tests.py", "exec"), names)
    names["check"](candidate)


class _Tally(ast.NodeTransformer):
    """`assert x` becomes `__tally__(lambda: x)`."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        call = ast.Call(ast.Name("__tally__", ast.Load()), [ast.Lambda(nothing, node.test)], [])
        return ast.copy_location(ast.Expr(call), node)


def _plain(value: Any) -> Any:
    """Only plain values are compared: an object of the program's own could claim to equal anything."""
    if type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple, set, frozenset):
        for each in value:
            _plain(each)
        return value
    if type(value) is dict:
        for key, each in value.items():
            _plain(key), _plain(each)
        return value
    raise TypeError(f"the function returned a {type(value).__name__}, which tests do not compare")


if __name__ == "__main__":
    main()
